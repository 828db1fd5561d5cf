"""Request bodies: validated JSON."""

from __future__ import annotations

import asyncio
import functools
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from starlette.requests import Request

from megatron.inference.server.errors import ApiError
from megatron.inference.server.threads import in_daemon_thread


class Body(BaseModel):
    """Base class of request bodies. A null field has its default; unknown fields are errors."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, fields: Any) -> Any:
        if isinstance(fields, dict):
            return {name: value for name, value in fields.items() if value is not None}
        return fields


B = TypeVar("B", bound=Body)
SMALL_BODY = 1 << 16  # characters; the check of fewer takes milliseconds
# Otherwise the server would read and discard the rest of the body.
CLOSE = {"Connection": "close"}


async def read_body(request: Request, kind: type[B], *, limit: int, seconds: float) -> B:
    """Read a body of at most `limit` bytes within `seconds`.

    Raises:
        ApiError: it is too large, too late, not JSON, or invalid for `kind`.
    """
    # Browsers let pages of other sites send other content types without a CORS preflight.
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "send the body as JSON, with the header Content-Type: application/json")
    try:
        content = await asyncio.wait_for(_read(request, limit), seconds)
    except asyncio.TimeoutError:
        late = f"the body did not arrive within {seconds:g} seconds"
        raise ApiError(408, late, headers=CLOSE) from None
    try:
        text = content.decode("utf-8")
        if len(text) < SMALL_BODY:
            return kind.model_validate_json(text)
        # The check of many prompts takes a second, in which other clients would get no answer.
        return await in_daemon_thread(functools.partial(kind.model_validate_json, text))
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8 text (byte {error.start})") from None
    except ValidationError as error:
        raise _wrong(error) from None


async def _read(request: Request, limit: int) -> bytes:
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > limit:
            large = f"the body is larger than the {limit} bytes that --max-body-bytes allows"
            raise ApiError(413, large, headers=CLOSE)
    return bytes(content)


def _wrong(error: ValidationError) -> ApiError:
    """Convert the first validation error to one line."""
    first = error.errors(include_url=False)[0]
    kind, message, param = first["type"], first["msg"], ".".join(map(str, first["loc"])) or None
    if kind == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first['ctx']['error']}")
    if param is None:
        return ApiError(400, "the body is not a JSON object")
    if kind == "missing":
        return ApiError(400, f"{param} is required", param=param)
    if kind == "extra_forbidden":
        return ApiError(400, f"{param[:60]} is not a field of this request", param=param)
    shown = _shown(first["input"])
    if kind == "value_error":
        message = str(first["ctx"]["error"])
    else:
        message = message.replace("Input should", "must").replace("a valid integer", "an integer")
        message = message.replace("a valid boolean", "true or false").replace("a valid", "a")
    text = f"{param} {message}, not {shown}" if message.startswith("must") else f"{param}: {shown} {message}"
    return ApiError(400, text, param=param)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
