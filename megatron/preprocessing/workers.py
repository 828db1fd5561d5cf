"""Parallel map over a stream of items in worker processes: ordered results, bounded memory, no orphans."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections.abc import Callable, Generator, Iterable
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar, cast

from megatron.errors import InputError

T = TypeVar("T")
R = TypeVar("R")

MAX_IN_FLIGHT = 4  # items per worker


def map_in_order(
    make: Callable[[Any], Callable[[T], R]], settings: Any, items: Iterable[T], workers: int
) -> Generator[R, None, None]:
    """Yield `make(settings)(item)` for each item, in order, computed by `workers` processes.

    `make` is called once in each process. Items are drawn as workers become idle. The processes end with this
    generator, so close it (`contextlib.closing`). They also end if this process is killed.

    Raises:
        InputError: a worker was killed, usually because memory ran out.
    """
    processes = dict(_start(make, settings) for _ in range(workers))
    busy: dict[Connection, int] = dict.fromkeys(
        processes, -1
    )  # number of the current item; -1 while the worker starts
    idle: list[Connection] = []
    numbered = enumerate(items)
    drawn = 0
    results: dict[int, R] = {}
    upcoming = 0  # number of the next result to yield
    try:
        while True:
            while idle and drawn < upcoming + MAX_IN_FLIGHT * workers:
                try:
                    number, item = next(numbered)
                except StopIteration:
                    break
                drawn += 1
                connection = idle.pop()
                with contextlib.suppress(ConnectionError):  # it died; receiving from it raises
                    connection.send(item)
                busy[connection] = number
            if upcoming in results:
                yield results.pop(upcoming)
                upcoming += 1
                continue
            if not busy:
                return
            for ready in wait(busy):
                connection = cast(Connection, ready)
                results[busy.pop(connection)] = _receive(connection, processes[connection], workers)
                idle.append(connection)
            results.pop(-1, None)
    finally:
        for connection, process in processes.items():
            connection.close()
            process.terminate()
            process.join()


def _start(make: Callable, settings: Any) -> tuple[Connection, BaseProcess]:
    context = multiprocessing.get_context("spawn")  # fork would copy locks held by the tokenizers' threads
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, make, settings), daemon=True)
    resource_tracker.ensure_running()  # otherwise process.start() does, which would unblock the signal
    # Ctrl-C reaches every process of a terminal. Workers inherit this mask and leave the handling to their parent.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    process.start()
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    theirs.close()  # only the worker has it open now, so this process notices when the worker ends
    return ours, process


def _serve(connection: Connection, make: Callable, settings: Any) -> None:
    """Run a worker: send None when ready, then the result of each item."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a library may have unblocked the signal
    work = make(settings)
    with contextlib.suppress(ConnectionError):  # the parent closed its end, or ended
        connection.send(None)
        while True:
            try:
                item = connection.recv()
            except (EOFError, OSError):  # OSError in the middle of a message
                return
            connection.send(work(item))


def _receive(connection: Connection, process: BaseProcess, workers: int) -> Any:
    try:
        return connection.recv()
    except (EOFError, OSError):  # OSError if it ended in the middle of a message
        process.join()
    if process.exitcode is not None and process.exitcode < 0:
        raise InputError(
            f"a worker process was killed by signal {-process.exitcode}, usually because memory ran out; "
            f"use fewer --workers than {workers}"
        )
    raise RuntimeError("a worker process failed; see its traceback above")
