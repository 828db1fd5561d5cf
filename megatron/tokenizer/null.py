"""Text that is token ids already."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.flags import InputError
from megatron.tokenizer.base import Tokenizer


class NullTokenizer(Tokenizer):
    """Whole numbers with white space between them, 0 to `ids` - 1; the id `ids` ends a document."""

    def __init__(self, ids: int) -> None:
        super().__init__("NullTokenizer", files=[], vocab_size=ids + 1, special_ids={"eod": ids})

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The numbers in each text.

        Raises:
            InputError: something is not a number, or not an id.
        """
        return [[self._id(word) for word in text.split()] for text in texts]

    def _id(self, word: str) -> int:
        digits = word.isascii() and word.isdecimal() and len(word) < 20
        if not digits or int(word) >= self.vocab_size:
            raise InputError(f"{word[:40]!r} is not a token id; {self.name} takes 0 to {self.vocab_size - 1}")
        return int(word)

    def detokenize(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))
