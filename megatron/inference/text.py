"""Text that appears as its tokens do."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.tokenizer import Tokenizer

# Tokens before the new ones that their text may depend on, as spaces do in some tokenizers; and how many may be
# waited for to complete a character, of four bytes at most.
BEFORE, PATIENCE = 6, 4
INCOMPLETE = "\ufffd"


class TextStream:
    """The text that follows on a prompt, up to the first of some stop strings. Special tokens are no text."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self._special = set(tokenizer.special_ids.values())
        self._ids = self._without_special(prompt[-BEFORE:])
        # Tokens from `_from` on are decoded together; those before `_shown` are text already.
        self._from, self._shown = 0, len(self._ids)
        self._held = ""  # text that may be the beginning of a stop string
        self.stopped = False

    def add(self, token: int) -> str:
        """The text that is certain with one more token, beyond what was before."""
        self._ids += self._without_special([token])
        text = self._decoded()
        if text.endswith(INCOMPLETE) and len(self._ids) - self._shown < PATIENCE:
            return ""
        return self._release(text)

    def finish(self) -> str:
        """What was held back."""
        text = "" if self.stopped else self._release(self._decoded()) + self._held
        self._held = ""
        return text

    def _without_special(self, tokens: Sequence[int]) -> list[int]:
        return [token for token in tokens if token not in self._special]

    def _decoded(self) -> str:
        before = self._tokenizer.detokenize(self._ids[self._from : self._shown])
        return self._tokenizer.detokenize(self._ids[self._from :])[len(before) :]

    def _release(self, text: str) -> str:
        if text:
            self._from, self._shown = self._shown, len(self._ids)
        text = self._held + text
        ends = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            self.stopped, self._held = True, ""
            return text[: min(ends)]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """How many of the last characters of a text are the first ones of a stop string."""
    return max((n for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
