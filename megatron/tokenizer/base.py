"""Base class of the tokenizers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.errors import InputError
from megatron.files import read_file
from megatron.tokenizer.config import TokenizerConfig


class SpecialToken:
    """Descriptor of a special token, such as `tokenizer.eod`: returns its id, or raises `InputError` without one."""

    def __init__(self, description: str) -> None:
        self.description = description

    def __set_name__(self, owner: type, role: str) -> None:
        self.role = role

    def __get__(self, tokenizer: Tokenizer | None, owner: type) -> Any:
        if tokenizer is None:
            return self
        if self.role not in tokenizer.special_ids:
            raise InputError(f"{tokenizer} has no {self.description} token")
        return tokenizer.special_ids[self.role]


class Tokenizer:
    """Base class of the tokenizers.

    Attributes:
        name: value of --tokenizer-type.
        files: absolute paths of the tokenizer's files; copies of them make the same tokenizer.
        vocab_size: number of ids, including special tokens; every id is below it.
        special_ids: ids of the special tokens by role.
    """

    eod = SpecialToken("end-of-document")
    bos = SpecialToken("beginning-of-sequence")
    eos = SpecialToken("end-of-sequence")
    pad = SpecialToken("padding")
    cls = SpecialToken("classification ([CLS])")
    sep = SpecialToken("separator ([SEP])")
    mask = SpecialToken("mask")

    def __init__(
        self, name: str, *, files: Sequence[Path], vocab_size: int, special_ids: Mapping[str, int]
    ) -> None:
        self.name = name
        self.files = [file.absolute() for file in files]
        self.vocab_size = vocab_size
        self.special_ids = dict(special_ids)

    def __str__(self) -> str:
        return " ".join([self.name, *(f"({file})" for file in self.files[:1])])

    @classmethod
    def from_config(cls, config: TokenizerConfig) -> Tokenizer:
        """Build the tokenizer from its flags."""
        raise NotImplementedError

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of `text`, without special tokens around them."""
        return self.tokenize_batch([text])[0]

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, as `tokenize` does. The texts have no lone surrogates."""
        raise NotImplementedError

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`. Invalid UTF-8, such as a truncated character, becomes U+FFFD."""
        raise NotImplementedError


def read_text(path: str) -> str:
    """Read a tokenizer's file.

    Raises:
        InputError: the file is unreadable, too large or not UTF-8.
    """
    try:
        return read_file(path).decode("utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is not UTF-8 text (byte {error.start})") from None


def read_json(path: str) -> Any:
    """Read a JSON file.

    Raises:
        InputError: the file is unreadable or not JSON.
    """
    text = read_text(path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: is not JSON: {error}") from None
