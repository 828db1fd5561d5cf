"""Tokenizer for text that consists of token ids."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.errors import InputError
from megatron.tokenizer.base import Tokenizer
from megatron.tokenizer.config import TokenizerConfig


class NullTokenizer(Tokenizer):
    """Whitespace-separated numbers from 0 to `ids` - 1; id `ids` ends a document."""

    def __init__(self, ids: int) -> None:
        super().__init__("NullTokenizer", files=[], vocab_size=ids + 1, special_ids={"eod": ids})

    @classmethod
    def from_config(cls, config: TokenizerConfig) -> NullTokenizer:
        return cls(*config.require("vocab_size"))

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Parse the numbers in each text.

        Raises:
            InputError: a word is not a number, or not an id.
        """
        return [[self._id(word) for word in text.split()] for text in texts]

    def _id(self, word: str) -> int:
        digits = word.isascii() and word.isdecimal() and len(word) < 20
        if not digits or int(word) >= self.vocab_size:
            raise InputError(
                f"{word[:40]!r} is not a token id; {self.name} accepts 0 to {self.vocab_size - 1}"
            )
        return int(word)

    def detokenize(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))
