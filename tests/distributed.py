"""Run a function in several processes of one gloo job."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

# Imported once by the fork server from which each process is forked. torch._dynamo, which dispatch modes import, takes
# two seconds.
PRELOAD = [
    *("torch", "torch._dynamo", "pytest", "distributed", "models"),
    *("megatron.training.pretrain", "megatron.pretrain_gpt", "megatron.plugins", "megatron.commands.verify"),
]


def run_distributed(function: Callable, processes: int, *arguments: Any, timeout: float = 240) -> list[Any]:
    """Run `function(*arguments)` on each rank and return the results in rank order.

    The function must be defined at the top level of its module. Fails with the tracebacks of the ranks that fail, or if
    one takes longer than `timeout` seconds.
    """
    started = start_distributed(function, processes, *arguments)
    try:
        results = [_result(rank, ours, timeout) for rank, (_, ours) in enumerate(started)]
    finally:
        for process, _ in started:
            process.kill()
            process.join()
    failures = [text for ok, text in results if not ok]
    assert not failures, "\n".join(failures)
    return [value for _, value in results]


def start_distributed(
    function: Callable, processes: int, *arguments: Any
) -> list[tuple[multiprocessing.Process, Connection]]:
    """Start the processes of `run_distributed` without waiting; each has a connection for its result."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    port = free_port()
    started = []
    for rank in range(processes):
        ours, theirs = context.Pipe()
        environment = rank_environment(rank, processes, port)
        process = context.Process(target=_run, args=(theirs, environment, function, arguments))
        process.start()
        theirs.close()
        started.append((process, ours))
    return started


def rank_environment(rank: int, processes: int, port: int) -> dict[str, str]:
    """Environment variables that torchrun sets for a process."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _result(rank: int, connection: Connection, timeout: float) -> tuple[bool, Any]:
    if not connection.poll(timeout):
        return False, f"rank {rank} did not end within {timeout} s"
    try:
        return connection.recv()
    except EOFError:
        return False, f"rank {rank} exited without a result"


def _run(connection: Connection, environment: dict[str, str], function: Callable, arguments: tuple) -> None:
    # The fork server blocks signals if a data loader of this test's process started it.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        connection.send((True, function(*arguments)))
    except BaseException:
        connection.send((False, f"rank {environment['RANK']}:\n{traceback.format_exc()}"))
    os._exit(0)
