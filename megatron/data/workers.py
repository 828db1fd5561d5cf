"""Work on a stream of items in other processes: results in order, memory bounded, nobody left behind."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from megatron.flags import InputError

T = TypeVar("T")
R = TypeVar("R")

AHEAD = 4  # items per worker that may be drawn before the oldest of them is done


def map_in_order(
    make: Callable[[Any], Callable[[T], R]], settings: Any, items: Iterable[T], workers: int
) -> Iterator[R]:
    """Yield `make(settings)(item)` for each item, in order, computed by `workers` processes.

    `make` is called once in each process. Items are drawn as workers come free. The processes end with this
    generator, so close it (`contextlib.closing`); they end by themselves if this process is killed.

    Raises:
        InputError: a worker was killed, as happens when memory runs out.
    """
    processes = dict(_start(make, settings) for _ in range(workers))
    busy: dict[Connection, int] = dict.fromkeys(processes, -1)  # number of its item; -1 while it starts
    idle: list[Connection] = []
    numbered = enumerate(items)
    drawn = 0
    results: dict[int, R] = {}
    wanted = 0  # number of the next result to yield
    try:
        while True:
            while idle and drawn < wanted + AHEAD * workers:
                try:
                    number, item = next(numbered)
                except StopIteration:
                    break
                drawn += 1
                connection = idle.pop()
                with contextlib.suppress(ConnectionError):  # it died; receiving from it will tell
                    connection.send(item)
                busy[connection] = number
            if wanted in results:
                yield results.pop(wanted)
                wanted += 1
                continue
            if not busy:
                return
            for connection in wait(busy):
                number = busy.pop(connection)
                results[number] = _receive(connection, processes[connection], workers)
                idle.append(connection)
            results.pop(-1, None)
    finally:
        for connection, process in processes.items():
            connection.close()
            process.terminate()
            process.join()


def _start(make: Callable, settings: Any) -> tuple[Connection, BaseProcess]:
    context = multiprocessing.get_context("spawn")  # a fork would copy the threads' locks of the tokenizers
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, make, settings), daemon=True)
    resource_tracker.ensure_running()  # else starting the process does this, which would lift the block below
    # Ctrl-C reaches every process of a terminal. A worker inherits this mask: it leaves the answer to its parent.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    process.start()
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    theirs.close()  # the worker alone holds it now, so its end is seen here
    return ours, process


def _serve(connection: Connection, make: Callable, settings: Any) -> None:
    """What a worker does: announce that it is ready, then answer each item with its result."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a library may have lifted the block that was inherited
    work = make(settings)
    with contextlib.suppress(EOFError, ConnectionError):  # the parent has closed its end, or is gone
        connection.send(None)
        while True:
            connection.send(work(connection.recv()))


def _receive(connection: Connection, process: BaseProcess, workers: int) -> Any:
    try:
        return connection.recv()
    except (EOFError, OSError):  # OSError where it ended in the middle of a message
        process.join()
    if process.exitcode < 0:
        raise InputError(
            f"a worker process was killed by signal {-process.exitcode}, most often for lack of memory; "
            f"use fewer --workers than {workers}"
        )
    raise RuntimeError("a worker process failed; its traceback stands above")
