"""Megatron-LM's `PUT /api`, with the fields of its v3.0 server (megatron/text_generation_server.py)."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field, model_validator

from megatron.inference.batching import Request
from megatron.inference.beam import BeamConfig, Hypothesis
from megatron.inference.sampling import SamplingConfig
from megatron.inference.server.body import Body
from megatron.inference.server.completions import MIN_TEMPERATURE, MIN_TOP_P, document_start
from megatron.inference.server.engine import BeamSearchRequest, TextDelta, Work
from megatron.inference.server.errors import ApiError
from megatron.inference.text import end_tokens
from megatron.inference.token_text import TokenText
from megatron.tokenizer import Tokenizer


class NvidiaRequest(Body):
    """Megatron-LM's fields, defaults and limits."""

    prompts: Annotated[list[str], Field(min_length=1, max_length=128)]
    tokens_to_generate: int = Field(64, ge=0, le=2**31)
    logprobs: bool = False
    temperature: float = Field(1.0, ge=MIN_TEMPERATURE, le=100)
    top_k: int = Field(0, ge=0, le=1000)
    top_p: float = Field(0.0, ge=0, le=1)
    top_p_decay: float = Field(0.0, ge=0, le=1)
    top_p_bound: float = Field(0.0, ge=0, le=1)
    add_BOS: bool = False
    stop_on_double_eol: bool = False
    stop_on_eol: bool = False
    random_seed: int | None = Field(None, ge=0, lt=2**32)
    no_log: bool = False
    beam_width: int | None = Field(None, ge=1)
    stop_token: int | None = None
    length_penalty: float = Field(1.0, ge=0, le=10)

    @model_validator(mode="after")
    def _check(self) -> NvidiaRequest:
        if self.top_p_decay:
            raise ApiError(400, "top_p_decay is not supported; leave it out", param="top_p_decay")
        if self.beam_width is None and self.stop_token is not None:
            raise ApiError(400, "stop_token needs beam_width", param="stop_token")
        if self.beam_width is not None and len(self.prompts) > 1:
            raise ApiError(
                400, f"prompts: beam search takes one prompt, not {len(self.prompts)}", param="prompts"
            )
        if self.beam_width is not None and not self.tokens_to_generate:
            raise ApiError(
                400, "tokens_to_generate: beam search needs at least 1", param="tokens_to_generate"
            )
        return self

    @property
    def count(self) -> int:
        """Number of sequences for the engine: beams count as one."""
        return len(self.prompts) if self.beam_width is None else 1

    def work(self, tokenizer: Tokenizer, max_beams: int) -> tuple[list[list[int]], Work]:
        """Return the tokens of the prompts, and the engine's work on them.

        Raises:
            InputError: the tokenizer cannot encode a prompt.
            ApiError: a field does not fit the tokenizer or the server.
        """
        rows = self.tokenize(tokenizer)
        if self.beam_width is None:
            return rows, self.requests(rows)
        return rows, self.search(rows[0], self.beam_width, max_beams, tokenizer)

    def tokenize(self, tokenizer: Tokenizer) -> list[list[int]]:
        """Tokenize the prompts.

        Raises:
            InputError: the tokenizer cannot encode a prompt.
            ApiError: add_BOS is set and the tokenizer has no such token.
        """
        rows = tokenizer.tokenize_batch(self.prompts)
        if not self.add_BOS:
            return [row or document_start(tokenizer, "prompts") for row in rows]
        first = tokenizer.special_ids.get("bos", tokenizer.special_ids.get("eod"))
        if first is None:
            raise ApiError(400, f"add_BOS: {tokenizer} has no beginning-of-sequence token", param="add_BOS")
        return [[first, *row] for row in rows]

    def requests(self, rows: Sequence[Sequence[int]]) -> list[Request]:
        """Create the requests for sampling."""
        stops = [
            text for text, enabled in (("\n\n", self.stop_on_double_eol), ("\n", self.stop_on_eol)) if enabled
        ]
        seed = secrets.randbits(32) if self.random_seed is None else self.random_seed
        return [
            Request(
                prompt=row,
                sampling=SamplingConfig(
                    out_seq_length=max(self.tokens_to_generate, 1),
                    temperature=self.temperature,
                    top_k=self.top_k,
                    top_p=self.top_p and max(self.top_p, MIN_TOP_P),
                    seed=(seed + number) % 2**32,
                ),
                stops=stops,
                top_logprobs=0 if self.logprobs else None,
                prompt_logprobs=self.logprobs,
            )
            for number, row in enumerate(rows)
        ]

    def search(
        self, prompt: Sequence[int], beam_width: int, rows: int, tokenizer: Tokenizer
    ) -> BeamSearchRequest:
        """Create the request for beam search, with at most as many beams as the server has rows.

        Raises:
            ApiError: there are too many beams, or stop_token is not a token id.
        """
        if beam_width > rows:
            raise ApiError(
                400,
                f"beam_width: {beam_width} is too large; the server has --max-batch-size {rows}",
                param="beam_width",
            )
        ends = end_tokens(tokenizer) if self.stop_token is None else {self.stop_token}
        if self.stop_token is not None and not 0 <= self.stop_token < tokenizer.vocab_size:
            raise ApiError(
                400,
                f"stop_token: {self.stop_token} is not a token id; give 0 to {tokenizer.vocab_size - 1}",
                param="stop_token",
            )
        config = BeamConfig(beam_width=beam_width, length_penalty=self.length_penalty)
        return BeamSearchRequest(prompt=prompt, config=config, length=self.tokens_to_generate, ends=ends)

    def response(
        self, rows: Sequence[Sequence[int]], events: Sequence[Any], tokenizer: Tokenizer
    ) -> dict[str, Any]:
        """Return the response body, from the tokens of the prompts and the engine's events."""
        if self.beam_width is None:
            return self.answer(rows, events, tokenizer)
        return self.beams(rows[0], events[0], tokenizer)

    def answer(
        self, rows: Sequence[Sequence[int]], deltas: Sequence[TextDelta], tokenizer: Tokenizer
    ) -> dict[str, list | None]:
        """Return the texts with their prompts, the tokens, and the log-probabilities of all tokens but the first."""
        texts, tokens = list(self.prompts), [list(row) for row in rows]
        logprobs: list[list[float]] = [[] for _ in rows]
        for delta in deltas:
            i = delta.index
            if self.logprobs and not logprobs[i]:
                logprobs[i] += [logprob.logprob for logprob in delta.prompt_logprobs]
            if self.tokens_to_generate:
                texts[i] += delta.text
                if delta.token is not None:
                    tokens[i].append(delta.token)
                    if delta.logprob is not None:
                        logprobs[i].append(delta.logprob.logprob)
        segments = [_segments(row, tokenizer) for row in tokens]
        return {"text": texts, "segments": segments, "logprobs": logprobs if self.logprobs else None}

    def beams(
        self, prompt: Sequence[int], hypotheses: Sequence[Hypothesis], tokenizer: Tokenizer
    ) -> dict[str, list[Any]]:
        """Return all beams, the best first."""
        rows = [[*prompt, *hypothesis.tokens] for hypothesis in hypotheses]
        return {
            "text": [tokenizer.detokenize(row) for row in rows],
            "segments": [_segments(row, tokenizer) for row in rows],
            "scores": [hypothesis.score for hypothesis in hypotheses],
        }


def _segments(row: Sequence[int], tokenizer: Tokenizer) -> list[str]:
    text = TokenText(tokenizer, [])
    segments = [text.add(token) for token in row]
    segments[-1] += text.finish()
    return segments
