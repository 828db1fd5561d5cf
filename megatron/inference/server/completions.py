"""OpenAI's completions: https://platform.openai.com/docs/api-reference/completions."""

from __future__ import annotations

import dataclasses
import secrets
import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, Field, PlainValidator, model_validator

from megatron.errors import InputError
from megatron.inference import prompts
from megatron.inference.batching import Request, TokenLogprob
from megatron.inference.sampling import SamplingConfig
from megatron.inference.server.body import Body
from megatron.inference.server.engine import TextDelta
from megatron.inference.server.errors import ApiError
from megatron.inference.token_text import TokenText
from megatron.tokenizer import Tokenizer

# A lower temperature means greedy decoding; dividing logits by it would overflow.
MIN_TEMPERATURE = 1e-6
# A smaller top-p would be zero in fp32, which means no limit.
MIN_TOP_P = 1e-6


def _prompts(value: Any) -> list[str] | list[list[int]]:
    """Convert each of OpenAI's forms of a prompt to a list."""
    values = value if isinstance(value, list) else [value]
    if values and all(isinstance(text, str) for text in values):
        return values
    if values and all(type(token) is int for token in values):
        return [values]
    if values and all(isinstance(row, list) and all(type(token) is int for token in row) for row in values):
        return values
    raise ValueError("must be a string, a list of strings, a list of token ids, or a list of such lists")


def read_stops(value: Any) -> list[str]:
    """Convert each of OpenAI's forms of stop strings to a list."""
    values = value if isinstance(value, list) else [value]
    if len(values) > 16 or not all(isinstance(text, str) and text for text in values):
        raise ValueError("must be a string, or a list of up to 16 strings, none empty")
    return values


def only(allowed: Any, instead: str) -> AfterValidator:
    """Reject an unsupported field unless it has the value without effect."""

    def check(value: Any) -> Any:
        if value != allowed:
            raise ValueError(f"is not supported; {instead}")
        return value

    return AfterValidator(check)


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool = False


class GenerationRequest(Body):
    """OpenAI's fields of both completions and chat, plus `top_k` and `repetition_penalty`."""

    model: str | None = None
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, le=2**31)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    n: int = Field(1, ge=1, le=128)
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: Annotated[list, PlainValidator(read_stops)] = Field(default_factory=list)
    seed: int | None = Field(None, ge=0, lt=2**32)
    user: str = ""
    presence_penalty: Annotated[float, only(0, "repetition_penalty is")] = 0.0
    frequency_penalty: Annotated[float, only(0, "repetition_penalty is")] = 0.0
    logit_bias: Annotated[dict, only({}, "leave it out")] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_stream(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream", param="stream_options")
        return self


class CompletionRequest(GenerationRequest):
    """A request for completions of prompts."""

    prompt: Annotated[list, PlainValidator(_prompts)]
    max_tokens: int = Field(16, ge=0, le=2**31)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False
    best_of: int | None = None
    suffix: Annotated[str, only("", "leave it out")] = ""

    @model_validator(mode="after")
    def _check(self) -> CompletionRequest:
        if self.best_of not in (None, self.n):
            raise ApiError(400, f"best_of: {self.best_of} is not supported; it must equal n", param="best_of")
        return self

    @property
    def count(self) -> int:
        """Number of texts to generate."""
        return len(self.prompt) * self.n

    def sampling(self, number: int) -> SamplingConfig:
        """Return the sampling settings of one of a prompt's `n` texts."""
        seed = secrets.randbits(32) if self.seed is None else self.seed + number
        greedy = self.temperature < MIN_TEMPERATURE
        return SamplingConfig(
            out_seq_length=max(self.max_tokens, 1),
            greedy=greedy,
            temperature=1.0 if greedy else self.temperature,
            top_k=self.top_k,
            top_p=0.0 if self.top_p == 1 else max(self.top_p, MIN_TOP_P),
            repetition_penalty=self.repetition_penalty,
            seed=seed % 2**32,
        )

    def choices(self, tokenizer: Tokenizer) -> list[ChoiceState]:
        """Create the choices: `n` texts for each prompt.

        Raises:
            InputError: the tokenizer cannot encode a prompt.
            ApiError: a token id is out of range.
        """
        if isinstance(self.prompt[0], str):
            texts, rows = self.prompt, tokenizer.tokenize_batch(self.prompt)
        else:
            rows = self.prompt
            check_tokens(rows, tokenizer)
            texts = [tokenizer.detokenize(row) if self.echo else "" for row in rows]
        pairs = [(text, row, i) for text, row in zip(texts, rows, strict=True) for i in range(self.n)]
        return [
            ChoiceState(
                self,
                number,
                text,
                row,
                self._request(row or document_start(tokenizer, "prompt"), i),
                TokenText(tokenizer, [] if self.echo else row),
            )
            for number, (text, row, i) in enumerate(pairs)
        ]

    def _request(self, prompt: list[int], number: int) -> Request:
        return Request(
            prompt=prompt,
            sampling=self.sampling(number),
            stops=self.stop,
            top_logprobs=self.logprobs,
            prompt_logprobs=self.echo and self.logprobs is not None,
        )


def document_start(tokenizer: Tokenizer, param: str) -> list[int]:
    """Return the tokens that stand for an empty prompt: the end of the document before.

    Raises:
        ApiError: the tokenizer has no end-of-document token.
    """
    try:
        return prompts.document_start(tokenizer)
    except InputError as error:
        raise ApiError(400, f"{param}: {error}", param=param) from None


def check_tokens(rows: Sequence[Sequence[int]], tokenizer: Tokenizer) -> None:
    """Raise `ApiError` unless all token ids are in the tokenizer's range."""
    for token in (token for row in rows for token in row):
        if not 0 <= token < tokenizer.vocab_size:
            raise ApiError(
                400,
                f"prompt: {token} is not a token id; give 0 to {tokenizer.vocab_size - 1}",
                param="prompt",
            )


@dataclasses.dataclass
class ChoiceState:
    """State of one choice of the response.

    Attributes:
        prompt, prompt_tokens: as given; they may be empty, and those of `request` may not.
        shown: some text has been sent.
    """

    body: CompletionRequest
    index: int
    prompt: str
    prompt_tokens: Sequence[int]
    request: Request
    token_text: TokenText
    generated: int = 0
    offset: int = 0
    has_begun: bool = False
    shown: bool = False

    def take(self, delta: TextDelta) -> dict[str, Any]:
        """Convert a delta to OpenAI's format."""
        text, logprobs, reason = delta.text, None, delta.reason
        tokens = [(token, delta.logprob) for token in (delta.token, delta.end_token) if token is not None]
        if self.body.max_tokens:
            self.generated += delta.token is not None
        else:
            text, tokens, reason = "", [], "length"
        if self.body.echo and not self.has_begun:
            text = self.prompt + text
            prompt = zip(self.prompt_tokens, [None, *delta.prompt_logprobs], strict=False)
            tokens = [*prompt, *tokens]
        self.has_begun = True
        if self.body.logprobs is not None:
            logprobs = self._logprobs(tokens)
        return {"index": self.index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, tokens: list[tuple[int, TokenLogprob | None]]) -> dict[str, list]:
        lists: dict[str, list] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, logprob in tokens:
            name, top = self.token_text.name(token), None
            if logprob is not None:
                top = {self.token_text.name(other): value for other, value in logprob.top}
                top[name] = logprob.logprob
            values = (name, logprob and logprob.logprob, top, self.offset)
            for entries, value in zip(lists.values(), values, strict=True):
                entries.append(value)
            self.offset += len(self.token_text.add(token))
        return lists


class Completion:
    """The response to a request: complete, or as chunks of a stream."""

    def __init__(self, body: CompletionRequest, choices: list[ChoiceState], model: str) -> None:
        self.body, self.choices = body, choices
        self.head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, each prompt counted once."""
        return sum(len(choice.request.prompt) for choice in self.choices[:: self.body.n])

    def usage(self) -> dict[str, int]:
        prompt, completion = self.prompt_tokens, sum(choice.generated for choice in self.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }

    def _take(self, delta: TextDelta) -> dict[str, Any]:
        """Convert a delta to OpenAI's format."""
        return self.choices[delta.index].take(delta)

    def chunk(self, delta: TextDelta) -> dict[str, Any] | None:
        """Return the next chunk of a stream; None if it would be empty."""
        choice = self._take(delta)
        if not choice["text"] and choice["logprobs"] is None and choice["finish_reason"] is None:
            return None
        usage = {"usage": None} if self.includes_usage else {}
        return {**self.head, "choices": [choice], **usage}

    @property
    def includes_usage(self) -> bool:
        options = self.body.stream_options
        return options is not None and options.include_usage

    def last_chunk(self) -> dict[str, Any]:
        return {**self.head, "choices": [], "usage": self.usage()}

    def whole(self, deltas: Sequence[TextDelta]) -> dict[str, Any]:
        """Return the complete response."""
        merged: list[dict[str, Any]] = [{} for _ in self.choices]
        for delta in deltas:
            new, choice = self._take(delta), merged[delta.index]
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
