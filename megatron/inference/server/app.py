"""The server's addresses, over HTTP."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import re
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megatron.flags import InputError
from megatron.inference.server.body import B, read_body
from megatron.inference.server.completions import Completion, CompletionRequest
from megatron.inference.server.config import ServerConfig
from megatron.inference.server.engine import STOPPING, Engine, Piece, Ticket
from megatron.inference.server.errors import ApiError
from megatron.inference.server.metrics import CONTENT_TYPE
from megatron.inference.server.nvidia import NvidiaRequest

T = TypeVar("T")

# Of the page and of whether the server lives nothing is secret.
OPEN_PATHS = ("/", "/health")
# What is told of a client that has hung up; nginx's.
GONE = 499


class Service:
    """What is done at each address."""

    def __init__(self, engine: Engine, config: ServerConfig, model: str) -> None:
        self.engine, self.config, self.model = engine, config, model
        self.tokenizer = engine.tokenizer
        self.page = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")

    async def completions(self, request: Request) -> Response:
        wanted = await self._read(request, CompletionRequest)
        if wanted.model not in (None, self.model):
            raise _no_model(wanted.model, self.model)
        choices = await asyncio.to_thread(wanted.choices, self.tokenizer)
        answer = Completion(wanted, choices, self.model)
        ticket = self.engine.submit([choice.request for choice in choices], self.config.request_timeout)
        self.engine.metrics.prompt_tokens += answer.prompt_tokens
        if not wanted.stream:
            return JSONResponse(answer.whole(await _all(ticket, request)))
        news = ticket.news()
        # Before it there may be a status that says what is wrong, afterwards there is one that says all is well.
        first = await _while_wanted(ticket, request, anext(news))
        return _TicketResponse(_events(answer, first, news), ticket)

    async def nvidia(self, request: Request) -> Response:
        wanted = await self._read(request, NvidiaRequest)
        rows = await asyncio.to_thread(wanted.tokenize, self.tokenizer)
        if wanted.beam_width is None:
            work = wanted.requests(rows)
        else:
            work = wanted.search(rows[0], self.engine.predictor.rows, self.tokenizer)
        ticket = self.engine.submit(work, self.config.request_timeout)
        self.engine.metrics.prompt_tokens += sum(map(len, rows))
        news = await _all(ticket, request)
        if wanted.beam_width is None:
            return JSONResponse(wanted.answer(rows, news, self.tokenizer))
        return JSONResponse(wanted.beams(rows[0], news[0], self.tokenizer))

    async def models(self) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def one_model(self, name: str) -> Response:
        if name != self.model:
            raise _no_model(name, self.model)
        return JSONResponse(self._model())

    async def health(self) -> Response:
        if self.engine.closing:
            raise ApiError(503, STOPPING)
        return JSONResponse({"status": "ok"})

    async def metrics(self) -> Response:
        running = self.engine.running
        page = self.engine.metrics.page(queue=max(self.engine.load - running, 0), running=running)
        return PlainTextResponse(page, media_type=CONTENT_TYPE)

    async def show_page(self) -> Response:
        return HTMLResponse(self.page, headers={"Content-Security-Policy": content_policy(self.page)})

    def _model(self) -> dict[str, Any]:
        length = self.engine.predictor.length
        return {"id": self.model, "object": "model", "created": 0, "owned_by": "you", "max_model_len": length}

    async def _read(self, request: Request, kind: type[B]) -> B:
        limit, seconds = self.config.max_body_bytes, self.config.request_timeout
        return await read_body(request, kind, limit=limit, seconds=seconds)


def make_app(engine: Engine, config: ServerConfig, *, model: str, key: str | None) -> ASGIApp:
    """All of the server but its sockets.

    Args:
        model: what clients call the model.
        key: what they must send, if anything.
    """
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    service = Service(engine, config, model)
    app.get("/")(service.show_page)
    app.get("/health")(service.health)
    app.get("/metrics")(service.metrics)
    app.get("/v1/models")(service.models)
    app.get("/v1/models/{name:path}")(service.one_model)
    app.post("/v1/completions")(service.completions)
    app.put("/api")(service.nvidia)

    async def answer(request: Request, error: Exception) -> Response:
        told = _as_api_error(request, error)
        return JSONResponse(told.body(), told.status, headers=told.headers)

    for kind in (ApiError, InputError, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(kind, answer)
    return _Gate(app, engine, key)


def content_policy(page: str) -> str:
    """A Content-Security-Policy under which nothing runs, and nothing is styled, but what stands in the page."""

    def hashes(tag: str) -> str:
        found = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in found]
        return " ".join(f"'sha256-{digest}'" for digest in digests)

    return (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


class _Gate:
    """Around the app: lets in who has the key, and counts answers."""

    def __init__(self, app: ASGIApp, engine: Engine, key: str | None) -> None:
        self.app, self.engine, self.key = app, engine, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = GONE

        async def counting(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        known = {"/", "/health", "/metrics", "/v1/models", "/v1/completions", "/api"}
        path = scope["path"] if scope["path"] in known else "other"
        try:
            if self._may_enter(scope):
                await self.app(scope, receive, counting)
            else:
                error = ApiError(
                    401,
                    "the API key is missing or wrong; send it as Authorization: Bearer KEY",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
                await JSONResponse(error.body(), 401, headers=error.headers)(scope, receive, counting)
        finally:
            self.engine.metrics.requests[path, status] += 1

    def _may_enter(self, scope: Scope) -> bool:
        if self.key is None or scope["path"] in OPEN_PATHS:
            return True
        given = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(given, f"Bearer {self.key}".encode())


class _TicketResponse(StreamingResponse):
    """Server-sent events about a ticket, which is cancelled when the client hangs up."""

    def __init__(self, events: AsyncIterator[str], ticket: Ticket) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self.ticket = ticket

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.ticket.cancel()


async def _events(answer: Completion, first: Piece, news: AsyncIterator[Piece]) -> AsyncIterator[str]:
    if chunk := answer.chunk(first):
        yield _event(chunk)
    try:
        async for piece in news:
            if chunk := answer.chunk(piece):
                yield _event(chunk)
    except ApiError as error:
        yield _event(error.body())
        return
    if answer.includes_usage:
        yield _event(answer.last_chunk())
    yield "data: [DONE]\n\n"


def _event(value: Any) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n"


async def _all(ticket: Ticket, request: Request) -> list:
    async def collect() -> list:
        return [news async for news in ticket.news()]

    return await _while_wanted(ticket, request, collect())


async def _while_wanted(ticket: Ticket, request: Request, work: Awaitable[T]) -> T:
    """What `work` on a ticket gives.

    Raises:
        ClientDisconnect: the client has hung up before; the ticket is cancelled.
    """

    async def hang_up() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = asyncio.ensure_future(work), asyncio.ensure_future(hang_up())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ClientDisconnect
        return tasks[0].result()
    except BaseException:
        ticket.cancel()
        raise
    finally:
        for task in tasks:
            task.cancel()


def _no_model(name: str, model: str) -> ApiError:
    return ApiError(
        404, f"there is no model {name[:60]!r}; this one is {model!r}", param="model", code="model_not_found"
    )


def _as_api_error(request: Request, error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InputError):
        return ApiError(400, str(error))
    if isinstance(error, ClientDisconnect):
        return ApiError(GONE, "the client has hung up")
    if isinstance(error, HTTPException):
        told = {
            404: f"there is nothing at {request.url.path[:60]}; texts are continued at POST /v1/completions",
            405: f"{request.method} is not for {request.url.path}",
        }
        return ApiError(error.status_code, told.get(error.status_code, error.detail), headers=error.headers)
    return ApiError(500, "the server has failed; its log says how")
