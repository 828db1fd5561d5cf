"""Processes that form one run and stay alive between measurements, each working only when asked."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch

TIMEOUT = 200  # seconds that one measurement may take


class Workers:
    """`measure(*arguments)`, a generator function of the top level of its module, in several processes."""

    def __init__(self, measure: Callable[..., Iterator], processes: int, *arguments: Any, threads: int = 1):
        context = multiprocessing.get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.started = []
        for rank in range(processes):
            ours, theirs = context.Pipe()
            environment = {"RANK": rank, "WORLD_SIZE": processes, "LOCAL_RANK": 0}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            process = context.Process(
                target=_serve, args=(theirs, environment, threads, measure, arguments), daemon=True
            )
            process.start()
            theirs.close()
            self.started.append((process, ours))

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for process, connection in self.started:
            connection.close()  # which ends it, if it waits for a request
            process.join(10)
            process.kill()

    def next(self) -> list[Any]:
        """What the generator of each rank yields next."""
        for _, connection in self.started:
            connection.send(None)
        return [_answer(rank, connection) for rank, (_, connection) in enumerate(self.started)]


def _answer(rank: int, connection: Connection) -> Any:
    if not connection.poll(TIMEOUT):
        raise RuntimeError(f"rank {rank} did not answer within {TIMEOUT} s")
    failure, value = connection.recv()
    if failure is not None:
        raise RuntimeError(f"rank {rank}:\n{failure}")
    return value


def _serve(
    connection: Connection, environment: dict[str, Any], threads: int, measure: Callable, arguments: tuple
) -> None:
    os.environ.update({name: str(value) for name, value in environment.items()})
    torch.set_num_threads(threads)
    try:
        connection.recv()
        for value in measure(*arguments):
            connection.send((None, value))
            connection.recv()
    except EOFError:  # nobody asks any more
        return
    except Exception:
        connection.send((traceback.format_exc(), None))
