"""Processes of one run that stay alive between measurements and are idle until the next request."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch

TIMEOUT = 200  # seconds per measurement


class Workers:
    """Run the generator `measure(*arguments)` in several processes. It must be a module-level function."""

    def __init__(self, measure: Callable[..., Iterator], processes: int, *arguments: Any, threads: int = 1):
        context = multiprocessing.get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.workers = []
        for rank in range(processes):
            parent, child = context.Pipe()
            environment = {"RANK": rank, "WORLD_SIZE": processes, "LOCAL_RANK": 0}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            process = context.Process(
                target=_serve, args=(child, environment, threads, measure, arguments), daemon=True
            )
            process.start()
            child.close()
            self.workers.append((process, parent))

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for process, connection in self.workers:
            connection.close()  # ends a process that waits for a request
            process.join(10)
            process.kill()
            process.join()  # its memory is free

    def next(self) -> list[Any]:
        """Return the next value of each rank's generator."""
        for _, connection in self.workers:
            connection.send(None)
        return [_receive(rank, connection) for rank, (_, connection) in enumerate(self.workers)]


def _receive(rank: int, connection: Connection) -> Any:
    if not connection.poll(TIMEOUT):
        raise RuntimeError(f"rank {rank} did not respond within {TIMEOUT} s")
    try:
        failure, value = connection.recv()
    except EOFError:
        raise RuntimeError(f"rank {rank} ended without an answer") from None
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
    except EOFError:  # the parent closed the connection
        return
    except Exception:
        connection.send((traceback.format_exc(), None))
