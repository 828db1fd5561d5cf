"""Tokens as text, each by itself."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.inference.text import BEFORE, INCOMPLETE
from megatron.tokenizer import Tokenizer


class Spelling:
    """What single tokens add to a text that goes on."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer, self._ids = tokenizer, list(prompt[-BEFORE:])
        self._before = tokenizer.detokenize(self._ids)

    def text(self, token: int) -> str:
        """What a token adds if it is next: what joined makes up the text. Of one that completes no character, what
        stands for it, or nothing."""
        return self._tokenizer.detokenize([*self._ids, token])[len(self._before) :]

    def name(self, token: int) -> str:
        """The same, or if that is no text of its own, `token_id:` and the number."""
        text = self.text(token)
        return text if text and INCOMPLETE not in text else f"token_id:{token}"

    def add(self, token: int) -> str:
        """Take a token as the next; gives what it adds."""
        text = self.text(token)
        self._ids = [*self._ids, token][-BEFORE:]
        self._before = self._tokenizer.detokenize(self._ids)
        return text
