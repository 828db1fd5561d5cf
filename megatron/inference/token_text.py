"""Text of single tokens."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.inference.text import INCOMPLETE, TextStream
from megatron.tokenizer import Tokenizer


class TokenText:
    """Text that each token adds to a growing text. Special tokens have theirs."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._stream = TextStream(tokenizer, prompt, keeps_special=True)
        self._before = tokenizer.detokenize(self._stream.context)

    def name(self, token: int) -> str:
        """Return the text that a token would add, or `token_id:` and its id if that is not whole characters."""
        text = self._tokenizer.detokenize([*self._stream.context, token])[len(self._before) :]
        return text if text and INCOMPLETE not in text else f"token_id:{token}"

    def add(self, token: int) -> str:
        """Append a token and return the text it adds; a character comes with the last of its tokens.

        With that of `finish`, these are the whole text.
        """
        text = self._stream.add(token)
        self._before = self._tokenizer.detokenize(self._stream.context)
        return text

    def finish(self) -> str:
        """Return the text of an incomplete character at the end."""
        return self._stream.finish()
