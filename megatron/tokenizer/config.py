"""Flags of the tokenizers."""

from __future__ import annotations

import dataclasses

from megatron.flags import Config, flag

# Three names of Megatron-LM's for one thing.
SENTENCE_PIECE_TYPES = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
TOKENIZER_TYPES = (
    "GPT2BPETokenizer",
    "BertWordPieceLowerCase",
    "BertWordPieceCase",
    *SENTENCE_PIECE_TYPES,
    "HuggingFaceTokenizer",
    "TikTokenizer",
    "NullTokenizer",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizerConfig(Config):
    """Which tokenizer, and where its files are."""

    tokenizer_type: str | None = flag(
        None, "kind of tokenizer, on which the files it needs depend", choices=TOKENIZER_TYPES
    )
    vocab_file: str | None = flag(
        None,
        "vocabulary: vocab.json of a GPT-2 BPE, vocab.txt of a BERT WordPiece",
        aliases=("--vocab",),
        metavar="FILE",
    )
    merge_file: str | None = flag(None, "merges.txt of a GPT-2 BPE", metavar="FILE")
    tokenizer_model: str | None = flag(
        None,
        "SentencePiece .model file, a vocabulary of tiktoken's, or a tokenizer.json or the directory holding one "
        "(HuggingFaceTokenizer)",
        metavar="PATH",
    )
    tiktoken_pattern: str | None = flag(
        None,
        "how a TikTokenizer cuts text into words: a pattern of Megatron-LM's or of OpenAI's",
        choices=("v1", "v2", "gpt2", "cl100k", "o200k"),
    )
    tiktoken_num_special_tokens: int = flag(
        1000, "special tokens that come before the pieces of a TikTokenizer's JSON vocabulary", low=7
    )
    vocab_size: int | None = flag(
        None,
        "number of ids of a NullTokenizer, and at most of a TikTokenizer's JSON vocabulary (default: 131072); the "
        "lines of vocab.txt leave [BOS] and [EOS] out; else checked against the files",
        low=1,
    )
    make_vocab_size_divisible_by: int = flag(
        128, "pad the vocabulary to a multiple of this times the tensor-parallel size", low=1
    )
