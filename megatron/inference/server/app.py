"""HTTP endpoints of the server."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megatron.errors import InputError
from megatron.inference.server.body import B, read_body
from megatron.inference.server.chat import ChatRequest
from megatron.inference.server.chat_template import chat_template
from megatron.inference.server.completions import Completion, CompletionRequest
from megatron.inference.server.config import ServerConfig, is_loopback
from megatron.inference.server.engine import (
    STOPPING,
    RequestHandle,
    ServedModel,
    ServingEngine,
    TextDelta,
    request_timeout,
)
from megatron.inference.server.errors import ApiError
from megatron.inference.server.metrics import CONTENT_TYPE
from megatron.inference.server.nvidia import NvidiaRequest
from megatron.inference.server.threads import in_daemon_thread

T = TypeVar("T")

# Paths that need no key.
OPEN_PATHS = ("/", "/health")
# nginx's status for a client that closed the connection.
CLIENT_CLOSED_REQUEST = 499


class Service:
    """Handlers of the endpoints."""

    def __init__(self, engine: ServingEngine, config: ServerConfig) -> None:
        """Raise `InputError` if a chat template is malformed."""
        self.engine, self.config = engine, config
        self.templates = {name: chat_template(model.tokenizer) for name, model in engine.models.items()}
        self.page = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")

    async def completions(self, request: Request) -> Response:
        body = await self._read(request, CompletionRequest)
        model = self._find(body.model)
        return await self._complete(
            request, body, model, lambda: Completion(body, body.choices(model.tokenizer), model.name)
        )

    async def chat(self, request: Request) -> Response:
        body = await self._read(request, ChatRequest)
        model = self._find(body.model)
        template = self.templates[model.name]
        return await self._complete(
            request, body, model, lambda: body.completion(model.tokenizer, template, model.name)
        )

    async def _complete(
        self,
        request: Request,
        body: CompletionRequest | ChatRequest,
        model: ServedModel,
        prepare: Callable[[], Completion],
    ) -> Response:
        """Respond to a request for completions, which `prepare` tokenizes."""
        param = "messages" if isinstance(body, ChatRequest) else "prompt"
        handle = self.engine.reserve(model, body.count, self.config.request_timeout, param)
        completion = await self._in_thread(handle, request, prepare)
        handle.start([choice.request for choice in completion.choices])
        self.engine.metrics.prompt_tokens += completion.prompt_tokens
        if not body.stream:
            events = await _all_events(handle, request)
            return await self._in_thread(handle, request, lambda: JSONResponse(completion.whole(events)))
        deltas = cast(AsyncIterator[TextDelta], handle.events())
        # Wait for the first event: the status can report an error only before the stream begins.
        first = await _while_connected(handle, request, anext(deltas))
        return _EventStream(_sse(completion, first, deltas), handle)

    async def nvidia(self, request: Request) -> Response:
        body = await self._read(request, NvidiaRequest)
        model = self._find(None)
        handle = self.engine.reserve(model, body.count, self.config.request_timeout, "prompts")
        tokenizer, max_beams = model.tokenizer, model.predictor.rows
        rows, work = await self._in_thread(handle, request, lambda: body.work(tokenizer, max_beams))
        handle.start(work)
        self.engine.metrics.prompt_tokens += sum(map(len, rows))
        events = await _all_events(handle, request)
        return await self._in_thread(
            handle, request, lambda: JSONResponse(body.response(rows, events, tokenizer))
        )

    async def models(self) -> Response:
        return JSONResponse(
            {"object": "list", "data": [_card(model) for model in self.engine.models.values()]}
        )

    async def one_model(self, name: str) -> Response:
        return JSONResponse(_card(self._find(name)))

    async def health(self) -> Response:
        if self.engine.closing:
            raise ApiError(503, STOPPING)
        return JSONResponse({"status": "ok"})

    async def metrics(self) -> Response:
        running = self.engine.running
        page = self.engine.metrics.page(queue=max(self.engine.in_flight - running, 0), running=running)
        return PlainTextResponse(page, media_type=CONTENT_TYPE)

    async def show_page(self) -> Response:
        return HTMLResponse(self.page, headers={"Content-Security-Policy": content_policy(self.page)})

    def _find(self, name: str | None) -> ServedModel:
        """Return the model that a client names, by default the first.

        Raises:
            ApiError: there is no such model.
        """
        models = self.engine.models
        if name is None:
            return next(iter(models.values()))
        if name not in models:
            served = " and ".join(repr(other) for other in models)
            raise ApiError(
                404,
                f"there is no model {name[:60]!r}; {'the model is' if len(models) == 1 else 'there are'} {served}",
                param="model",
                code="model_not_found",
            )
        return models[name]

    async def _in_thread(self, handle: RequestHandle, request: Request, function: Callable[[], T]) -> T:
        """Tokenize a request or format its response on another thread, since that may take long."""
        seconds = self.config.request_timeout
        try:
            return await _while_connected(
                handle, request, asyncio.wait_for(in_daemon_thread(function), seconds)
            )
        except asyncio.TimeoutError:
            raise request_timeout(seconds) from None

    async def _read(self, request: Request, kind: type[B]) -> B:
        limit, seconds = self.config.max_body_bytes, self.config.request_timeout
        return await read_body(request, kind, limit=limit, seconds=seconds)


def make_app(engine: ServingEngine, config: ServerConfig, *, key: str | None) -> ASGIApp:
    """Create the ASGI app.

    Args:
        key: API key that clients must send; None requires none.

    Raises:
        InputError: a chat template is malformed.
    """
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    service = Service(engine, config)
    app.get("/")(service.show_page)
    app.get("/health")(service.health)
    app.get("/metrics")(service.metrics)
    app.get("/v1/models")(service.models)
    app.get("/v1/models/{name:path}")(service.one_model)
    app.post("/v1/completions")(service.completions)
    app.post("/v1/chat/completions")(service.chat)
    app.put("/api")(service.nvidia)

    async def answer(request: Request, error: Exception) -> Response:
        api_error = _as_api_error(request, error)
        body = api_error.body()
        if request.url.path == "/api":
            body["message"] = str(api_error)  # where NVIDIA's command line looks for it
        return JSONResponse(body, api_error.status, headers=api_error.headers)

    for kind in (ApiError, InputError, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(kind, answer)
    return _Access(app, engine, key, checks_host=key is None and is_loopback(config.host))


def content_policy(page: str) -> str:
    """Return a Content-Security-Policy that allows only the page's own scripts and styles."""

    def hashes(tag: str) -> str:
        contents = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in contents]
        return " ".join(f"'sha256-{digest}'" for digest in digests)

    return (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


class _Access:
    """Middleware that checks who asks, and counts responses."""

    def __init__(self, app: ASGIApp, engine: ServingEngine, key: str | None, *, checks_host: bool) -> None:
        self.app, self.engine, self.key, self.checks_host = app, engine, key, checks_host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = CLIENT_CLOSED_REQUEST

        async def counting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                # Browsers must not take a response for another type than it says.
                message["headers"] = [*message.get("headers", ()), (b"x-content-type-options", b"nosniff")]
            await send(message)

        known = {"/", "/health", "/metrics", "/v1/models", "/v1/completions", "/v1/chat/completions", "/api"}
        path = scope["path"] if scope["path"] in known else "other"
        try:
            error = self._refusal(scope)
            if error is None:
                await self.app(scope, receive, counting)
            else:
                response = JSONResponse(error.body(), error.status, headers=error.headers)
                await response(scope, receive, counting)
        finally:
            self.engine.metrics.requests[path, status] += 1

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = dict(scope["headers"])
        if self.checks_host:
            return _foreign(headers)
        if self.key is None or scope["path"] in OPEN_PATHS:
            return None
        given = headers.get(b"authorization", b"")
        if hmac.compare_digest(given, f"Bearer {self.key}".encode()):
            return None
        return ApiError(
            401,
            "the API key is missing or wrong; send it as Authorization: Bearer KEY",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


def _foreign(headers: dict[bytes, bytes]) -> ApiError | None:
    """Refuse requests that a page of another site makes a browser send to this machine.

    With DNS rebinding such a page reaches the server under its own name, which is then the Host.
    """
    host, origin = (headers.get(name, b"").decode("latin-1") for name in (b"host", b"origin"))
    try:
        name = urlsplit(f"//{host}").hostname or ""
        own_page = not origin or urlsplit(origin).netloc == host
    except ValueError:  # a malformed address
        return ApiError(400, "the Host or Origin header is not an address")
    if not is_loopback(name):
        return ApiError(
            403,
            f"Host: {host[:60]} does not name this machine, as it must without an API key; use localhost",
        )
    if not own_page:
        return ApiError(403, f"Origin: {origin[:60]} is another site, which may not use this server")
    return None


class _EventStream(StreamingResponse):
    """Server-sent events of a request, which is cancelled when the client disconnects."""

    def __init__(self, events: AsyncIterator[str], handle: RequestHandle) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self.handle = handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_and_yield(message: Message) -> None:
            await send(message)
            # If many events wait, the loop would otherwise notice only after all of them that the client is gone.
            await asyncio.sleep(0)

        try:
            await super().__call__(scope, receive, send_and_yield)
        finally:
            self.handle.cancel()


async def _sse(
    completion: Completion, first: TextDelta, deltas: AsyncIterator[TextDelta]
) -> AsyncIterator[str]:
    if chunk := await _chunk(completion, first):
        yield chunk
    try:
        async for delta in deltas:
            if chunk := await _chunk(completion, delta):
                yield chunk
    except ApiError as error:
        yield _event(error.body())
        return
    if completion.includes_usage:
        yield _event(completion.last_chunk())
    yield "data: [DONE]\n\n"


async def _chunk(completion: Completion, delta: TextDelta) -> str:
    """Format a delta; empty if there is nothing to send."""

    def format_delta() -> str:
        chunk = completion.chunk(delta)
        return _event(chunk) if chunk else ""

    # The first one may have the log-probabilities of a long prompt.
    if delta.prompt_logprobs and not completion.choices[delta.index].has_begun:
        return await in_daemon_thread(format_delta)
    return format_delta()


def _event(value: Any) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n"


async def _all_events(handle: RequestHandle, request: Request) -> list:
    async def collect() -> list:
        return [event async for event in handle.events()]

    return await _while_connected(handle, request, collect())


async def _while_connected(handle: RequestHandle, request: Request, work: Awaitable[T]) -> T:
    """Await `work` on a request.

    Raises:
        ClientDisconnect: the client disconnected first; the request is cancelled.
    """

    async def disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = asyncio.ensure_future(work), asyncio.ensure_future(disconnect())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ClientDisconnect
        return tasks[0].result()
    except BaseException:
        handle.cancel()
        raise
    finally:
        for task in tasks:
            task.cancel()


def _card(model: ServedModel) -> dict[str, Any]:
    """OpenAI's description of a model, with vLLM's name of its maximum length."""
    length = model.predictor.length
    return {"id": model.name, "object": "model", "created": 0, "owned_by": "you", "max_model_len": length}


def _as_api_error(request: Request, error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InputError):
        return ApiError(400, str(error))
    if isinstance(error, ClientDisconnect):
        return ApiError(CLIENT_CLOSED_REQUEST, "the client closed the connection")
    if isinstance(error, HTTPException):
        messages = {
            404: f"there is no {request.url.path[:60]}; see POST /v1/completions and /v1/chat/completions",
            405: f"{request.method} is not allowed for {request.url.path}",
        }
        return ApiError(
            error.status_code, messages.get(error.status_code, error.detail), headers=error.headers
        )
    return ApiError(500, "internal error; see the server's log")
