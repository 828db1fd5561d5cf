"""Run a function in the processes of a layout, joined by gloo as torchrun's are."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron.errors import InputError, TrainingFault

# Seconds that the other ranks get to end by themselves after one has failed.
GRACE = 5.0
# Seconds between looks at the ranks.
INTERVAL = 0.02
# `start` and `exitcode` of multiprocessing read the exit status of any child, once. If two threads read it at the same
# time, the second takes a rank that ended well for one that failed.
_children = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Failure:
    """The first rank that failed, and the end of its output."""

    rank: int
    message: str


def launch(
    function: Callable[..., None], processes: int, arguments: tuple, log: Path, *, timeout: float
) -> Failure | None:
    """Run `function(*arguments)` on each rank.

    Args:
        function: defined at the top level of its module.
        log: prefix of the files that ranks print to; each appends its rank.
        timeout: seconds after which all are ended.

    Returns:
        None if all ranks returned.
    """
    # Each process is forked from a server that has imported torch once, with what dispatch modes import.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([function.__module__, "megatron.plugins", "torch._dynamo"])
    port = _free_port()
    ranks: list[tuple[Any, Path]] = []
    try:
        for rank in range(processes):
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(processes),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            path = log.with_name(f"{log.name}-{rank}.log")
            process = context.Process(target=_run, args=(environment, str(path), function, arguments))
            with _children:
                process.start()
            ranks.append((process, path))
        failed, running = _wait([process for process, _ in ranks], timeout)
    finally:
        # Those that run on after a failure, a timeout or an interrupt.
        with _children:
            for process, _ in ranks:
                process.kill()
                process.join()
    if failed is not None:
        return Failure(failed, _tail(ranks[failed][1]))
    return Failure(running[0], f"did not end within {timeout:g} seconds") if running else None


def _wait(processes: list[Any], timeout: float) -> tuple[int | None, list[int]]:
    """Wait until all ranks have ended. Returns the first that failed, and those that still run."""
    end = time.monotonic() + timeout
    failed: int | None = None
    running = list(range(len(processes)))
    while running and time.monotonic() < end:
        with _children:
            ended = {rank: processes[rank].exitcode for rank in running}
        running = [rank for rank in running if ended[rank] is None]
        for rank, code in ended.items():
            if code and failed is None:
                failed, end = rank, min(end, time.monotonic() + GRACE)
        time.sleep(INTERVAL if running else 0)
    return failed, running


def _tail(path: Path, lines: int = 12) -> str:
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    return "\n".join(text.splitlines()[-lines:])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _run(environment: dict[str, str], path: str, function: Callable[..., None], arguments: Any) -> None:
    # The fork server blocks signals if a thread of this process started it.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.environ.update(environment)
    torch.set_num_threads(1)
    status = 1
    with open(path, "w", encoding="utf-8") as file:
        sys.stdout = sys.stderr = file
        try:
            function(*arguments)
            status = 0
        except (InputError, TrainingFault) as error:
            print(f"error: {error}")
        except BaseException:
            traceback.print_exc()
    # The fork server ends the process without the interpreter's shutdown, during which gloo's threads may abort.
    sys.exit(status)
