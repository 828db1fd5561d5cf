"""Tokenizers: text to token ids and back."""

from __future__ import annotations

import importlib

from megatron.errors import InputError
from megatron.tokenizer.base import Tokenizer
from megatron.tokenizer.config import TOKENIZERS, TokenizerConfig

__all__ = ["Tokenizer", "build_tokenizer", "padded_vocab_size"]


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Build the tokenizer that --tokenizer-type names. Reads local files only, never the network.

    Raises:
        InputError: a flag is missing, a file is missing or malformed, or --vocab-size contradicts the files.
    """
    (kind,) = config.require("tokenizer_type")
    module, _, name = TOKENIZERS[kind].partition(":")
    tokenizer: Tokenizer = getattr(importlib.import_module(module), name).from_config(config)
    if kind != "NullTokenizer" and config.vocab_size not in (None, tokenizer.vocab_size):
        raise InputError(
            f"--vocab-size: {config.vocab_size}, but {tokenizer} has {tokenizer.vocab_size} ids; "
            "leave the flag out, or give other files"
        )
    return tokenizer


def padded_vocab_size(vocab_size: int, make_vocab_size_divisible_by: int, tensor_parallel_size: int) -> int:
    """Round `vocab_size` up to a multiple of the divisor times the tensor-parallel size: rows of the embedding."""
    multiple = make_vocab_size_divisible_by * tensor_parallel_size
    return -(-vocab_size // multiple) * multiple
