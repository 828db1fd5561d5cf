"""A server from its start to its end."""

from __future__ import annotations

import errno
import math
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from megatron.flags import InputError
from megatron.inference.predictor import Predictor
from megatron.inference.server.config import KEY_VARIABLE, ServerConfig
from megatron.inference.server.engine import Engine
from megatron.tokenizer import Tokenizer

try:
    import fastapi  # noqa: F401
    import uvicorn
    from starlette.types import ASGIApp
except ImportError:
    raise InputError("the server needs FastAPI and uvicorn: pip install fastapi uvicorn") from None

from megatron.inference.server.app import make_app

# Seconds that texts under way have to end when the server is stopped, and that answers have to be sent.
GRACE, SENDING = 5, 3
# A signal that follows on another after so many seconds is meant; before, torchrun passes on what a terminal has sent
# to all.
AGAIN = 1


def listen(config: ServerConfig) -> socket.socket:
    """A socket at --host and --port, that nobody can connect to yet.

    Raises:
        InputError: there can be none.
    """
    host, port = config.host, config.port
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise InputError(f"--port: {port} is in use; give another, or 0 for a free one") from None
        if error.errno == errno.EACCES:
            raise InputError(f"--port: {port} takes rights that you have not; give one above 1023") from None
        raise InputError(f"--host: {host} is no address of this machine ({error.strerror})") from None
    return listener


def serve(
    config: ServerConfig, name: str, listener: socket.socket, predictor: Predictor, tokenizer: Tokenizer
) -> None:
    """Serve a model until SIGTERM, or until Ctrl-C, which is a KeyboardInterrupt. For the main thread.

    Args:
        name: of the model, where --served-model-name gives none.
    """
    length = config.inference_max_seq_length or predictor.context
    if length > predictor.context:
        raise InputError(
            f"--inference-max-seq-length: {length} is longer than the model's context of {predictor.context}"
        )
    try:
        predictor.reserve(config.max_batch_size, length)
    except InputError as error:
        raise InputError(f"--max-batch-size, --inference-max-seq-length: {error}") from None
    engine = Engine(predictor, tokenizer, max_queue=config.max_queue)
    key, model = config.api_key(), config.served_model_name or name
    app = make_app(engine, config, model=model, key=key)
    host, port = listener.getsockname()[:2]
    if key is None and not (host.startswith("127.") or host == "::1"):
        print(
            f"note: whoever reaches this machine can use the model; --api-key-file or {KEY_VARIABLE} asks for a key",
            file=sys.stderr,
        )
    with _stopping_on_signals(engine) as received:
        shown = f"[{host}]" if ":" in host else host
        run(engine, app, listener, greeting=f"{model} is served at http://{shown}:{port}, until Ctrl-C")
    if signal.SIGINT in received:
        raise KeyboardInterrupt


def run(engine: Engine, app: ASGIApp, listener: socket.socket, *, greeting: str) -> None:
    """Run an engine on this thread, and HTTP beside it on another, until the engine is stopped."""
    settings = uvicorn.Config(
        app,
        lifespan="off",
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=SENDING,
    )
    server = uvicorn.Server(settings)

    def http() -> None:
        try:
            server.run(sockets=[listener])
        finally:
            engine.stop(0)

    listener.listen(settings.backlog)  # who comes from now on waits for an answer
    print(greeting, flush=True)
    thread = threading.Thread(target=http)
    thread.start()
    try:
        engine.run()
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def _stopping_on_signals(engine: Engine) -> Iterator[list[int]]:
    """A block in which SIGTERM and Ctrl-C stop the engine, gently the first time; gives those that have come.

    An exception would cut a computation that other processes take part in.
    """
    received: list[int] = []
    again = math.inf

    def stop(number: int, frame: object) -> None:
        nonlocal again
        if not received:
            again = time.monotonic() + AGAIN
            engine.stop(GRACE)
        elif time.monotonic() > again:
            engine.stop(0)
        received.append(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
