"""OpenAI's chat completions: https://platform.openai.com/docs/api-reference/chat."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field, PlainValidator, model_validator

from megatron.inference.server.body import Body
from megatron.inference.server.chat_template import ChatTemplate
from megatron.inference.server.completions import (
    ChoiceState,
    Completion,
    CompletionRequest,
    GenerationRequest,
)
from megatron.inference.server.engine import TextDelta
from megatron.inference.server.errors import ApiError
from megatron.inference.text import INCOMPLETE
from megatron.tokenizer import Tokenizer


def _content(value: Any) -> str:
    """Text of a message: a string, or a list of parts with texts."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in value
    ):
        return "".join(part["text"] for part in value)
    raise ValueError("must be a string, or a list of parts of type text")


class ChatMessage(Body):
    """A message of a conversation."""

    role: str
    content: Annotated[str, PlainValidator(_content)] = ""
    name: str = ""


class ChatRequest(GenerationRequest):
    """A request for answers in a conversation."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1, le=2**31)
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)

    @model_validator(mode="after")
    def _check(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs", param="top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise ApiError(
                400, "give max_tokens or max_completion_tokens, and not both", param="max_completion_tokens"
            )
        return self

    @property
    def count(self) -> int:
        """Number of texts to generate."""
        return self.n

    def completion(self, tokenizer: Tokenizer, template: ChatTemplate, model: str) -> ChatCompletion:
        """Create the completion of the rendered conversation, which may fill the context.

        Raises:
            InputError: the tokenizer cannot encode the conversation.
            ApiError: the template cannot render it.
        """
        messages = [{"role": message.role, "content": message.content} for message in self.messages]
        body = CompletionRequest(
            prompt=[tokenizer.tokenize(template.render(messages))],
            max_tokens=self.max_tokens or self.max_completion_tokens or 2**31,
            logprobs=self.top_logprobs if self.logprobs else None,
            **{
                name: getattr(self, name)
                for name in ("temperature", "top_p", "top_k", "repetition_penalty", "n", "seed", "stream")
            },
            stream_options=self.stream_options,
        )
        body = body.model_copy(update={"stop": [*self.stop, *template.stops]})
        return ChatCompletion(body, body.choices(tokenizer), model, strips=template.strips)


class ChatCompletion(Completion):
    """The response to a chat request: complete, or as chunks of a stream."""

    def __init__(
        self, body: CompletionRequest, choices: list[ChoiceState], model: str, *, strips: bool
    ) -> None:
        """`strips`: leave out whitespace at the beginning of an answer."""
        super().__init__(body, choices, model)
        self.head |= {
            "id": f"chat{self.head['id']}",
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
        }
        self.strips, self.begun = strips, [False] * len(choices)

    def chunk(self, delta: TextDelta) -> dict[str, Any] | None:
        """Return the next chunk of a stream; None if it would be empty."""
        begins = not self.begun[delta.index]
        choice = self._take(delta)
        logprobs = choice["logprobs"]
        if not (begins or choice["text"] or logprobs or choice["finish_reason"]):
            return None
        shown = {"role": "assistant"} if begins else {}
        if begins or choice["text"]:
            shown["content"] = choice["text"]
        usage = {"usage": None} if self.includes_usage else {}
        return {**self.head, "choices": [self._choice(choice, "delta", shown)], **usage}

    def whole(self, deltas: Sequence[TextDelta]) -> dict[str, Any]:
        answer = super().whole(deltas)
        answer["choices"] = [
            self._choice(
                choice,
                "message",
                {
                    "role": "assistant",
                    "content": choice["text"].lstrip() if self.strips else choice["text"],
                    "refusal": None,
                },
            )
            for choice in answer["choices"]
        ]
        return answer

    def _take(self, delta: TextDelta) -> dict[str, Any]:
        """Convert a delta, without the token that ends the answer.

        Leaves out whitespace before the first word if the template says so.
        """
        choice = super()._take(dataclasses.replace(delta, end_token=None))
        if self.strips and not self.choices[delta.index].shown:
            choice["text"] = choice["text"].lstrip()
        self.choices[delta.index].shown |= bool(choice["text"])
        self.begun[delta.index] = True
        return choice

    def _choice(self, choice: dict[str, Any], key: str, shown: dict[str, Any]) -> dict[str, Any]:
        """Convert a choice of a completion to one of a chat."""
        logprobs = choice["logprobs"]
        if logprobs is not None:
            logprobs = {"content": _logprobs(logprobs, self.body.logprobs or 0), "refusal": None}
        return {
            "index": choice["index"],
            key: shown,
            "logprobs": logprobs,
            "finish_reason": choice["finish_reason"],
        }


def _logprobs(lists: dict[str, list], num_top: int) -> list[dict[str, Any]]:
    """Convert the lists of a completion, whose `top_logprobs` have the token itself too."""
    rows = zip(lists["tokens"], lists["token_logprobs"], lists["top_logprobs"], strict=True)
    return [
        {
            **_token(name, logprob),
            "top_logprobs": [
                _token(other, value)
                for other, value in sorted(top.items(), key=lambda entry: -entry[1])[:num_top]
            ],
        }
        for name, logprob, top in rows
    ]


def _token(name: str, logprob: float) -> dict[str, Any]:
    whole = INCOMPLETE not in name and not name.startswith("token_id:")
    return {"token": name, "logprob": logprob, "bytes": list(name.encode()) if whole else None}
