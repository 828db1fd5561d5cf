"""The tokenizer by its folder or file (--tokenizer), which stands for --tokenizer-type and the flags of its files."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from megatron.cli import make_config
from megatron.errors import InputError
from megatron.flags import flag, flag_name
from megatron.tokenizer.config import TokenizerConfig
from megatron.tokenizer.detect import detect_tokenizer

HELP = (
    "tokenizer as a folder or file, in place of --tokenizer-type and its files: a Hugging Face folder, tokenizer.json, "
    "vocab.json with merges.txt, BERT's vocab.txt, or a SentencePiece .model"
)
# Fields that --tokenizer stands for.
FIELDS = ("tokenizer_type", "vocab_file", "merge_file", "tokenizer_model")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizerFlags(TokenizerConfig):
    """Tokenizer, by its folder or by its type and files."""

    tokenizer: str | None = flag(None, HELP, metavar="PATH")


def expand_tokenizer(given: dict[str, Any]) -> dict[str, Any]:
    """Add the values that --tokenizer stands for to those given.

    Raises:
        InputError: there is no tokenizer at that path, or flags are given that it stands for.
    """
    path = given.get("tokenizer")
    if path is None:
        return given
    fields = {field.name: field for field in dataclasses.fields(TokenizerConfig)}
    clash = [flag_name(fields[name]) for name in FIELDS if given.get(name) is not None]
    if clash:
        raise InputError(
            f"--tokenizer and {clash[0]} exclude each other; --tokenizer gives the type and all files"
        )
    found = detect_tokenizer(path)
    values = {name: getattr(found, name) for name in fields}
    return {name: value for name, value in values.items() if value != fields[name].default} | given


def tokenizer_config(values: Mapping[str, Any]) -> TokenizerConfig:
    """Build the configuration of a command's tokenizer from the values of `TokenizerFlags`."""
    return make_config(TokenizerConfig, expand_tokenizer(dict(values)))
