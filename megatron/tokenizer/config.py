"""Flags of the tokenizers, and their registry."""

from __future__ import annotations

import dataclasses

from megatron.flags import Config, flag

# Class of each --tokenizer-type, as 'module:class' so that a run imports only the one it uses. The class has a
# classmethod from_config(config: TokenizerConfig). The three SentencePiece names are Megatron-LM's.
TOKENIZERS = {
    "GPT2BPETokenizer": "megatron.tokenizer.gpt2:GPT2BPETokenizer",
    "BertWordPieceLowerCase": "megatron.tokenizer.bert:BertWordPieceTokenizer",
    "BertWordPieceCase": "megatron.tokenizer.bert:BertWordPieceTokenizer",
    "SentencePieceTokenizer": "megatron.tokenizer.sentence_piece:SentencePieceTokenizer",
    "GPTSentencePieceTokenizer": "megatron.tokenizer.sentence_piece:SentencePieceTokenizer",
    "Llama2Tokenizer": "megatron.tokenizer.sentence_piece:SentencePieceTokenizer",
    "HuggingFaceTokenizer": "megatron.tokenizer.huggingface:HuggingFaceTokenizer",
    "TikTokenizer": "megatron.tokenizer.tiktoken_file:TikTokenizer",
    "NullTokenizer": "megatron.tokenizer.null:NullTokenizer",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizerConfig(Config):
    """Tokenizer type and files."""

    tokenizer_type: str | None = flag(None, "type of tokenizer (see --tokenizer)", choices=tuple(TOKENIZERS))
    vocab_file: str | None = flag(
        None,
        "vocabulary: vocab.json of a GPT-2 BPE, or vocab.txt of a BERT WordPiece (NullTokenizer needs no files)",
        aliases=("--vocab",),
        metavar="FILE",
    )
    merge_file: str | None = flag(None, "merges.txt of a GPT-2 BPE", metavar="FILE")
    tokenizer_model: str | None = flag(
        None,
        "SentencePiece .model file, tiktoken vocabulary, or (HuggingFaceTokenizer) a tokenizer.json or its directory",
        metavar="PATH",
    )
    tiktoken_pattern: str | None = flag(
        None,
        "TikTokenizer: pre-tokenization pattern, either Megatron-LM's (v1, v2) or OpenAI's",
        choices=("v1", "v2", "gpt2", "cl100k", "o200k"),
    )
    tiktoken_num_special_tokens: int = flag(
        1000, "TikTokenizer: number of special tokens, which precede the tokens of a JSON vocabulary", low=7
    )
    vocab_size: int | None = flag(
        None,
        "NullTokenizer: number of ids. TikTokenizer: maximum for a JSON vocabulary (default: 131072). BertWordPiece: "
        "set it to the number of lines of vocab.txt to leave out [BOS] and [EOS]. Others: checked against the files",
        low=1,
    )
    make_vocab_size_divisible_by: int = flag(
        128, "pad the vocabulary to a multiple of N times the tensor-parallel size", low=1
    )
