"""Text of single tokens."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.inference.text import CONTEXT_TOKENS, INCOMPLETE
from megatron.tokenizer import Tokenizer


class TokenText:
    """Text that each token adds to a growing text."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer, self._ids = tokenizer, list(prompt[-CONTEXT_TOKENS:])
        self._before = tokenizer.detokenize(self._ids)

    def text(self, token: int) -> str:
        """Return the text that a token would add; joined, these are the whole text.

        For a token that completes no character it is a replacement character or empty.
        """
        return self._tokenizer.detokenize([*self._ids, token])[len(self._before) :]

    def name(self, token: int) -> str:
        """Return the token's text, or `token_id:` and its id if it has no text of its own."""
        text = self.text(token)
        return text if text and INCOMPLETE not in text else f"token_id:{token}"

    def add(self, token: int) -> str:
        """Append a token and return the text it adds."""
        text = self.text(token)
        self._ids = [*self._ids, token][-CONTEXT_TOKENS:]
        self._before = self._tokenizer.detokenize(self._ids)
        return text
