"""OpenAI's completions: https://platform.openai.com/docs/api-reference/completions."""

from __future__ import annotations

import dataclasses
import secrets
import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, Field, PlainValidator, model_validator

from megatron.inference.batching import Request, Score
from megatron.inference.sampling import SamplingConfig
from megatron.inference.server.body import Body
from megatron.inference.server.engine import Piece
from megatron.inference.server.errors import ApiError
from megatron.inference.server.spelling import Spelling
from megatron.tokenizer import Tokenizer

# Below, the limit is meant: the most probable token. Logits over less than this overflow.
COLDEST = 1e-6
# The same for top-p, which is fp32 there: less would be zero, and zero means all.
NARROWEST = 1e-6


def _prompts(value: Any) -> list[str] | list[list[int]]:
    """As a list, whatever the form."""
    values = value if isinstance(value, list) else [value]
    if values and all(isinstance(text, str) for text in values):
        return values
    if values and all(type(token) is int for token in values):
        return [values]
    if values and all(isinstance(row, list) and all(type(token) is int for token in row) for row in values):
        return values
    raise ValueError("must be a text, a list of texts, a list of token ids, or a list of such lists")


def _stops(value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    if len(values) > 16 or not all(isinstance(text, str) and text for text in values):
        raise ValueError("must be a text, or a list of up to 16 of them, none empty")
    return values


def _none_but(allowed: Any, instead: str) -> AfterValidator:
    """Of a field that is known and not supported: the one value that asks for nothing."""

    def check(value: Any) -> Any:
        if value != allowed:
            raise ValueError(f"is not supported; {instead}")
        return value

    return AfterValidator(check)


class StreamOptions(Body):
    """What a stream tells beside the text."""

    include_usage: bool = False


class CompletionRequest(Body):
    """OpenAI's fields, and `top_k` and `repetition_penalty`."""

    prompt: Annotated[list, PlainValidator(_prompts)]
    model: str | None = None
    max_tokens: int = Field(16, ge=0, le=2**31)
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, le=2**31)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    n: int = Field(1, ge=1, le=128)
    stream: bool = False
    stream_options: StreamOptions | None = None
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False
    stop: Annotated[list, PlainValidator(_stops)] = Field(default_factory=list)
    seed: int | None = Field(None, ge=0, lt=2**32)
    user: str = ""
    best_of: int | None = None
    presence_penalty: Annotated[float, _none_but(0, "repetition_penalty is")] = 0.0
    frequency_penalty: Annotated[float, _none_but(0, "repetition_penalty is")] = 0.0
    suffix: Annotated[str, _none_but("", "leave it out")] = ""
    logit_bias: Annotated[dict, _none_but({}, "leave it out")] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> CompletionRequest:
        if self.best_of not in (None, self.n):
            raise ApiError(400, f"best_of: {self.best_of} is not supported unless it is n", param="best_of")
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream", param="stream_options")
        return self

    def sampling(self, number: int) -> SamplingConfig:
        """Of one of the `n` texts of a prompt."""
        seed = secrets.randbits(32) if self.seed is None else self.seed + number
        greedy = self.temperature < COLDEST
        return SamplingConfig(
            out_seq_length=max(self.max_tokens, 1),
            greedy=greedy,
            temperature=1.0 if greedy else self.temperature,
            top_k=self.top_k,
            top_p=0.0 if self.top_p == 1 else max(self.top_p, NARROWEST),
            repetition_penalty=self.repetition_penalty,
            seed=seed % 2**32,
        )

    def choices(self, tokenizer: Tokenizer) -> list[Choice]:
        """What is asked for: `n` texts for each prompt.

        Raises:
            InputError: a prompt is no text of the tokenizer.
            ApiError: a token is none.
        """
        if isinstance(self.prompt[0], str):
            texts, rows = self.prompt, tokenizer.tokenize_batch(self.prompt)
        else:
            rows = self.prompt
            check_tokens(rows, tokenizer)
            texts = [tokenizer.detokenize(row) if self.echo else "" for row in rows]
        pairs = [(text, row, i) for text, row in zip(texts, rows, strict=True) for i in range(self.n)]
        return [
            Choice(self, number, text, self._request(row, i), Spelling(tokenizer, [] if self.echo else row))
            for number, (text, row, i) in enumerate(pairs)
        ]

    def _request(self, prompt: list[int], number: int) -> Request:
        return Request(
            prompt=prompt,
            sampling=self.sampling(number),
            stops=self.stop,
            alternatives=self.logprobs,
            scores_prompt=self.echo and self.logprobs is not None,
        )


def check_tokens(rows: Sequence[Sequence[int]], tokenizer: Tokenizer) -> None:
    """Raise `ApiError` unless all are ids of the tokenizer."""
    for token in (token for row in rows for token in row):
        if not 0 <= token < tokenizer.vocab_size:
            raise ApiError(
                400,
                f"prompt: {token} is not a token id; give 0 to {tokenizer.vocab_size - 1}",
                param="prompt",
            )


@dataclasses.dataclass
class Choice:
    """One text on its way to the client."""

    wanted: CompletionRequest
    index: int
    prompt: str
    request: Request
    spelling: Spelling
    generated: int = 0
    offset: int = 0
    has_begun: bool = False

    def take(self, piece: Piece) -> dict[str, Any]:
        """What a piece adds, in OpenAI's form."""
        text, logprobs, reason = piece.text, None, piece.reason
        told = [(piece.token, piece.score)] if piece.token is not None else []
        if not self.wanted.max_tokens:
            text, told, reason = "", [], "length"
        self.generated += len(told)
        if self.wanted.echo and not self.has_begun:
            text = self.prompt + text
            told = [*zip(self.request.prompt, [None, *piece.prompt_scores], strict=False), *told]
        self.has_begun = True
        if self.wanted.logprobs is not None:
            logprobs = self._logprobs(told)
        return {"index": self.index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, told: list[tuple[int, Score | None]]) -> dict[str, list]:
        lists = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, score in told:
            name, best = self.spelling.name(token), None
            if score is not None:
                best = {self.spelling.name(other): logprob for other, logprob in score.alternatives}
                best[name] = score.logprob
            values = (name, score and score.logprob, best, self.offset)
            for entries, value in zip(lists.values(), values, strict=True):
                entries.append(value)
            self.offset += len(self.spelling.add(token))
        return lists


class Completion:
    """The answer to a request: whole, or as chunks of a stream."""

    def __init__(self, wanted: CompletionRequest, choices: list[Choice], model: str) -> None:
        self.wanted, self.choices = wanted, choices
        self.head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts, each counted once."""
        return sum(len(choice.request.prompt) for choice in self.choices[:: self.wanted.n])

    def usage(self) -> dict[str, int]:
        prompt, completion = self.prompt_tokens, sum(choice.generated for choice in self.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }

    def chunk(self, piece: Piece) -> dict[str, Any] | None:
        """The next chunk of a stream; None if there is nothing to tell."""
        choice = self.choices[piece.number].take(piece)
        if not choice["text"] and choice["logprobs"] is None and choice["finish_reason"] is None:
            return None
        usage = {"usage": None} if self.includes_usage else {}
        return {**self.head, "choices": [choice], **usage}

    @property
    def includes_usage(self) -> bool:
        options = self.wanted.stream_options
        return options is not None and options.include_usage

    def last_chunk(self) -> dict[str, Any]:
        return {**self.head, "choices": [], "usage": self.usage()}

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """All of it."""
        merged: list[dict[str, Any]] = [{} for _ in self.choices]
        for piece in pieces:
            new, choice = self.choices[piece.number].take(piece), merged[piece.number]
            choice["index"] = new["index"]
            choice["text"] = choice.get("text", "") + new["text"]
            if new["logprobs"] is None:
                choice["logprobs"] = None
            else:
                lists = choice.setdefault("logprobs", {name: [] for name in new["logprobs"]})
                for name, entries in new["logprobs"].items():
                    lists[name] += entries
            choice["finish_reason"] = new["finish_reason"]
        return {**self.head, "choices": merged, "usage": self.usage()}
