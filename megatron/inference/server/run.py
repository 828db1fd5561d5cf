"""Start and stop the server."""

from __future__ import annotations

import errno
import math
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from megatron.errors import InputError
from megatron.inference.predictor import Predictor
from megatron.inference.server.config import KEY_VARIABLE, ServerConfig, is_loopback
from megatron.inference.server.engine import ServingEngine
from megatron.tokenizer import Tokenizer

try:
    import fastapi  # noqa: F401
    import uvicorn
    from starlette.types import ASGIApp
except ImportError:
    raise InputError("the server needs FastAPI and uvicorn: pip install fastapi uvicorn") from None

from megatron.inference.server.app import make_app
from megatron.inference.server.protocol import LimitedProtocol

# Seconds for running sequences to end when the server stops, and then for responses to be sent.
GRACE_SECONDS, SEND_SECONDS = 5, 3
# A second signal counts only after this many seconds: torchrun repeats signals that a terminal sends to all processes.
REPEAT_SECONDS = 1


def listen(config: ServerConfig) -> socket.socket:
    """Bind a socket to --host and --port, without accepting connections yet.

    Raises:
        InputError: it cannot be bound.
    """
    host, port = config.host, config.port
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise InputError(f"--port: {port} is in use; choose another, or 0 for any free port") from None
        if error.errno == errno.EACCES:
            raise InputError(f"--port: {port} needs privileges; choose a port above 1023") from None
        raise InputError(f"--host: {host} is not an address of this machine ({error.strerror})") from None
    return listener


def serve(
    config: ServerConfig, listener: socket.socket, models: Mapping[str, tuple[Predictor, Tokenizer]]
) -> None:
    """Serve models until SIGTERM, or until Ctrl-C, which raises KeyboardInterrupt. Call it on the main thread.

    Args:
        models: by name.
    """
    for predictor, _ in models.values():
        length = config.inference_max_seq_length or predictor.context
        if length > predictor.context:
            raise InputError(
                f"--inference-max-seq-length: {length} is longer than the model's context of {predictor.context}"
            )
        try:
            predictor.reserve(config.max_batch_size, length)
        except InputError as error:
            raise InputError(f"--max-batch-size, --inference-max-seq-length: {error}") from None
    engine, key = ServingEngine(models, max_queue=config.max_queue), config.api_key()
    app = make_app(engine, config, key=key)
    host, port = listener.getsockname()[:2]
    if key is None and not is_loopback(host):
        print(
            f"note: anyone who reaches {host} can use the model; --api-key-file or {KEY_VARIABLE} sets a key",
            file=sys.stderr,
        )
    with _stopping_on_signals(engine) as received:
        shown = f"[{host}]" if ":" in host else host
        run(
            engine,
            app,
            listener,
            greeting=f"serving {' and '.join(models)} at http://{shown}:{port} (Ctrl-C stops)",
        )
    if signal.SIGINT in received:
        raise KeyboardInterrupt


def run(engine: ServingEngine, app: ASGIApp, listener: socket.socket, *, greeting: str) -> None:
    """Run the engine on this thread and HTTP on another until the engine stops."""
    settings = uvicorn.Config(
        app,
        http=LimitedProtocol,
        lifespan="off",
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=SEND_SECONDS,
    )
    server = uvicorn.Server(settings)

    def http() -> None:
        try:
            server.run(sockets=[listener])
        finally:
            engine.stop(0)

    listener.listen(settings.backlog)  # clients can connect from now on
    print(greeting, flush=True)
    thread = threading.Thread(target=http)
    thread.start()
    try:
        engine.run()
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def _stopping_on_signals(engine: ServingEngine) -> Iterator[list[int]]:
    """Stop the engine on SIGTERM and Ctrl-C: with a grace period the first time, at once the second time.

    Yields the list of signals received. An exception instead would interrupt collectives with other processes.
    """
    received: list[int] = []
    repeat = math.inf

    def stop(number: int, frame: object) -> None:
        nonlocal repeat
        if not received:
            repeat = time.monotonic() + REPEAT_SECONDS
            engine.stop(GRACE_SECONDS)
        elif time.monotonic() > repeat:
            engine.stop(0)
        received.append(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
