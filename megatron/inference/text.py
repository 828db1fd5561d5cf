"""Incremental detokenization."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from megatron.errors import InputError
from megatron.tokenizer import Tokenizer
from megatron.tokenizer.base import read_json

# Preceding tokens that the text of new ones may depend on, such as spaces in some tokenizers; and tokens to wait for an
# incomplete character, which has at most four bytes.
CONTEXT_TOKENS, MAX_INCOMPLETE_TOKENS = 6, 4
INCOMPLETE = "\ufffd"


@functools.cache  # a server may outlive the files of the checkpoint that it serves
def end_tokens(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the tokens that end a text: the end of a document, and what a Hugging Face model adds to it.

    Chat models list the end of a turn under "eos_token_id" of their generation_config.json only.

    Raises:
        InputError: that file is malformed.
    """
    ends: set[int] = {tokenizer.special_ids["eod"]} if "eod" in tokenizer.special_ids else set()
    for file in tokenizer.files:
        if file.name == "generation_config.json":
            settings = read_json(str(file))
            listed = settings.get("eos_token_id") if isinstance(settings, dict) else None
            listed = listed if isinstance(listed, list) else [] if listed is None else [listed]
            if not all(type(token) is int for token in listed):
                raise InputError(f"{file}: eos_token_id is not a token id or a list of them")
            ends.update(token for token in listed if 0 <= token < tokenizer.vocab_size)
    return frozenset(ends)


class TextStream:
    """Text of the tokens after a prompt, up to the first stop string. Special tokens are left out by default."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stops: Sequence[str] = (),
        *,
        keeps_special: bool = False,
    ) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self._special = set() if keeps_special else set(tokenizer.special_ids.values())
        self._ids = self._last_of(prompt)
        # Tokens from `_from` on are decoded together; the text of those before `_shown` has been returned.
        self._from, self._shown = 0, len(self._ids)
        self._incomplete = 0  # tokens of an incomplete character at the end
        self._held = ""  # text that may begin a stop string
        self.stopped = False

    def add(self, token: int) -> str:
        """Return the text that is final with one more token, since the previous call."""
        self._ids += self._without_special([token])
        text = self._decoded()
        self._incomplete = self._incomplete + 1 if text.endswith(INCOMPLETE) else 0
        if 0 < self._incomplete < MAX_INCOMPLETE_TOKENS:
            return ""
        self._incomplete = 0
        return self._release(text)

    def finish(self) -> str:
        """Return the text that was held back."""
        text = "" if self.stopped else self._release(self._decoded()) + self._held
        self._held = ""
        return text

    @property
    def context(self) -> Sequence[int]:
        """The tokens that the text of the next one may depend on."""
        return self._ids[self._from :]

    def _last_of(self, prompt: Sequence[int]) -> list[int]:
        """Return the last tokens of a prompt, from the beginning of a character on.

        Byte-fallback decoders replace all bytes of a run that begins within a character.
        """
        ids = list[int]()
        for count in range(CONTEXT_TOKENS, CONTEXT_TOKENS + MAX_INCOMPLETE_TOKENS):
            ids = self._without_special(prompt[-count:])
            if not self._tokenizer.detokenize(ids).startswith(INCOMPLETE):
                break
        return ids

    def _without_special(self, tokens: Sequence[int]) -> list[int]:
        return [token for token in tokens if token not in self._special]

    def _decoded(self) -> str:
        before = self._tokenizer.detokenize(self._ids[self._from : self._shown])
        return self._tokenizer.detokenize(self._ids[self._from :])[len(before) :]

    def _release(self, text: str) -> str:
        if text:
            self._from, self._shown = self._shown, len(self._ids)
        else:  # a long run of tokens without a text is not decoded again and again
            self._from = max(self._from, len(self._ids) - CONTEXT_TOKENS - MAX_INCOMPLETE_TOKENS)
            self._shown = max(self._from, self._shown)
        text = self._held + text
        ends = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            self.stopped, self._held = True, ""
            return text[: min(ends)]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """Return the number of characters at the end of a text that begin a stop string."""
    return max((n for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
