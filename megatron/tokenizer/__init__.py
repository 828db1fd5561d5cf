"""Text to token ids and back."""

from __future__ import annotations

from megatron.flags import InputError
from megatron.tokenizer.base import Tokenizer
from megatron.tokenizer.config import SENTENCE_PIECE_TYPES, TokenizerConfig

__all__ = ["Tokenizer", "build_tokenizer", "padded_vocab_size"]


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer that `config` describes. Reads local files only, never the network.

    Raises:
        InputError: a flag is missing, or a file is missing or malformed, or `--vocab-size` is not that of
            the files.
    """
    config.require("tokenizer_type")
    tokenizer = _load(config)
    if config.tokenizer_type != "NullTokenizer" and config.vocab_size not in (None, tokenizer.vocab_size):
        raise InputError(
            f"--vocab-size: {config.vocab_size}, but {tokenizer} has {tokenizer.vocab_size} ids; "
            "leave the flag out, or give the other files"
        )
    return tokenizer


def _load(config: TokenizerConfig) -> Tokenizer:
    # Imported here, so that a kind of tokenizer needs its own library only.
    if config.tokenizer_type == "GPT2BPETokenizer":
        from megatron.tokenizer.gpt2 import GPT2BPETokenizer

        config.require("vocab_file", "merge_file")
        return GPT2BPETokenizer(config.vocab_file, config.merge_file)
    if config.tokenizer_type in ("BertWordPieceLowerCase", "BertWordPieceCase"):
        from megatron.tokenizer.bert import BertWordPieceTokenizer

        config.require("vocab_file")
        return BertWordPieceTokenizer(
            config.vocab_file,
            lowercase=config.tokenizer_type == "BertWordPieceLowerCase",
            vocab_size=config.vocab_size,
        )
    if config.tokenizer_type in SENTENCE_PIECE_TYPES:
        from megatron.tokenizer.sentence_piece import SentencePieceTokenizer

        config.require("tokenizer_model")
        return SentencePieceTokenizer(config.tokenizer_model)
    if config.tokenizer_type == "HuggingFaceTokenizer":
        from megatron.tokenizer.huggingface import HuggingFaceTokenizer

        config.require("tokenizer_model")
        return HuggingFaceTokenizer(config.tokenizer_model)
    if config.tokenizer_type == "TikTokenizer":
        from megatron.tokenizer.tiktoken_file import TikTokenizer

        config.require("tokenizer_model", "tiktoken_pattern")
        return TikTokenizer(
            config.tokenizer_model,
            pattern=config.tiktoken_pattern,
            num_special_tokens=config.tiktoken_num_special_tokens,
            vocab_size=config.vocab_size,
        )
    from megatron.tokenizer.null import NullTokenizer

    config.require("vocab_size")
    return NullTokenizer(config.vocab_size)


def padded_vocab_size(vocab_size: int, make_vocab_size_divisible_by: int, tensor_parallel_size: int) -> int:
    """Rows of the embedding: `vocab_size` rounded up to a multiple of the divisor times the number of shards."""
    multiple = make_vocab_size_divisible_by * tensor_parallel_size
    return -(-vocab_size // multiple) * multiple
