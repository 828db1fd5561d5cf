"""Work beside the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar, cast

T = TypeVar("T")


async def in_daemon_thread(function: Callable[[], T]) -> T:
    """Run a function on a thread of its own, which does not hold up the exit of the process."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is None:
            future.set_result(cast(T, result))
        else:
            future.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = function()
        except BaseException as caught:  # a panic in a tokenizer's Rust code is not an Exception
            error = caught
        with suppress(RuntimeError):  # the loop is closed: no client waits
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, daemon=True).start()
    return await future
