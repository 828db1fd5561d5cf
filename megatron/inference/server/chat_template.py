"""Chat templates: a conversation as one text that the model continues."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.errors import InputError
from megatron.inference.server.errors import ApiError
from megatron.tokenizer import Tokenizer
from megatron.tokenizer.base import read_json, read_text

# Roles of the plain template, for tokenizers without one of their own, as they stand in the text.
PLAIN_ROLES = {"system": "System", "user": "User", "assistant": "Assistant"}
Message = Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A chat template.

    Attributes:
        render: from messages, each with "role" and "content", to the text that the assistant's answer continues.
        stops: strings that end an answer and are not part of it.
        strips: leave out whitespace at the beginning of an answer.
    """

    render: Callable[[Sequence[Message]], str]
    stops: tuple[str, ...] = ()
    strips: bool = False


def render_plain(messages: Sequence[Message]) -> str:
    """Render the plain template: "User: ...", "Assistant: ..." and so on in paragraphs.

    Raises:
        ApiError: a message has another role than system, user and assistant.
    """
    for message in messages:
        if message["role"] not in PLAIN_ROLES:
            raise ApiError(
                400,
                f"messages: the role {message['role'][:60]!r} is none of {', '.join(PLAIN_ROLES)}, those of the plain "
                "chat template",
                param="messages",
            )
    parts = [f"{PLAIN_ROLES[message['role']]}: {message['content']}\n\n" for message in messages]
    return "".join(parts) + "Assistant:"


PLAIN = ChatTemplate(render_plain, stops=("\nUser:", "\nSystem:"), strips=True)


def chat_template(tokenizer: Tokenizer) -> ChatTemplate:
    """Return the chat template of a Hugging Face tokenizer that has one, and otherwise the plain template.

    It is the file chat_template.jinja or the key "chat_template" of tokenizer_config.json.

    Raises:
        InputError: the template is malformed, or Jinja2 is not installed.
    """
    files = {file.name: file for file in tokenizer.files}
    config, template = files.get("tokenizer_config.json"), files.get("chat_template.jinja")
    settings = read_json(str(config)) if config is not None else {}
    if template is not None:
        return ChatTemplate(_jinja_renderer(read_text(str(template)), template, settings))
    source = settings.get("chat_template")
    if isinstance(source, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        if "default" not in named:
            raise InputError(f"{config}: chat_template has no template named 'default'; rename one to it")
        source = named["default"]
    if source is None or config is None:
        return PLAIN
    if not isinstance(source, str):
        raise InputError(f"{config}: chat_template is not a string")
    return ChatTemplate(_jinja_renderer(source, config, settings))


def _jinja_renderer(source: str, path: Path, settings: dict[str, Any]) -> Callable[[Sequence[Message]], str]:
    """Compile a template in Jinja2's sandbox, where it reaches nothing but its arguments."""
    try:
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        from megatron.inference.server.generation_block import GenerationBlock
    except ImportError:
        raise InputError("chat templates need Jinja2: pip install jinja2") from None
    # As transformers renders templates, so that the same text comes out.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
    try:
        template = environment.from_string(source)
    except jinja2.TemplateError as error:
        raise InputError(f"{path}: the chat template is not valid Jinja2: {error}") from None
    tokens = {name: _token(value) for name, value in settings.items() if name.endswith("_token")}
    tokens = {name: token for name, token in tokens.items() if isinstance(token, str)}

    def render(messages: Sequence[Message]) -> str:
        try:
            return template.render(
                **tokens,
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
            )
        except Exception as error:  # a template may do anything with the messages
            text = " ".join(str(error).split())
            raise ApiError(400, f"messages: the chat template fails: {text}", param="messages") from None

    return render


def _token(value: Any) -> Any:
    """Text of a special token, which may be an object with its properties."""
    return value.get("content") if isinstance(value, dict) else value


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Filter with transformers' arguments; Jinja2's own escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise ValueError(message)


def _now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
