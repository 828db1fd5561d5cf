"""Worker processes that map a stream of items in order."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron.errors import InputError
from megatron.preprocessing.workers import MAX_IN_FLIGHT, _serve, map_in_order

ROOT = Path(__file__).resolve().parents[2]


def make_slow_square(settings: int) -> Callable[[int], int]:
    """Every third item takes longer, so that later items overtake it."""

    def square(item: int) -> int:
        time.sleep(0.02 if item % 3 == 0 else 0.001)
        return settings + item * item

    return square


def make_killed(item_that_kills: int) -> Callable[[int], int]:
    def work(item: int) -> int:
        if item == item_that_kills:
            os.kill(os.getpid(), signal.SIGKILL)
        return item

    return work


def make_stopped_and_killed(_: None) -> Callable[[bytes], None]:
    """Worker that stops reading soon after its first item, and is then killed."""

    def work(item: bytes) -> None:
        if not item:
            pid = os.getpid()
            subprocess.Popen(["sh", "-c", f"sleep 0.2; kill -STOP {pid}; sleep 0.6; kill -KILL {pid}"])

    return work


def make_killed_while_sending(item_that_kills: int) -> Callable[[int], bytes]:
    """Worker that is killed while it sends a result that exceeds the pipe's buffer."""

    def work(item: int) -> bytes:
        if item != item_that_kills:
            return b""
        subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -KILL {os.getpid()}"])
        return bytes(10_000_000)

    return work


def make_failing(_: None) -> Callable[[int], int]:
    def work(item: int) -> int:
        return 1 // item

    return work


def make_unbuildable(_: None) -> Callable[[object], int]:
    raise ValueError("cannot be made")


@pytest.mark.parametrize("workers", [1, 3])
def test_results_come_in_order(workers):
    assert list(map_in_order(make_slow_square, 7, range(40), workers)) == [7 + i * i for i in range(40)]
    assert not multiprocessing.active_children()


def test_no_items():
    assert list(map_in_order(make_slow_square, 0, [], 2)) == []


def test_items_are_drawn_on_demand():
    drawn = []

    def items() -> Iterator[int]:
        for i in range(1000):
            drawn.append(i)
            yield i

    with contextlib.closing(map_in_order(make_slow_square, 0, items(), 2)) as results:
        for count, _ in enumerate(results, start=1):
            assert len(drawn) <= count + 2 * MAX_IN_FLIGHT
            if count == 50:
                break
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("item", [0, 5])
def test_a_killed_worker_is_an_error(item):
    with pytest.raises(InputError, match=r"killed by signal 9, .* use fewer --workers than 2"):
        list(map_in_order(make_killed, item, range(20), 2))
    assert not multiprocessing.active_children()


def test_a_worker_killed_while_an_item_is_sent_to_it_is_an_error():
    """The unread part of the item makes the operating system report a different error."""

    def items() -> Iterator[bytes]:
        yield b""
        time.sleep(0.4)
        yield bytes(10_000_000)

    with pytest.raises(InputError, match="killed by signal 9"):
        list(map_in_order(make_stopped_and_killed, None, items(), 1))


def test_a_worker_killed_while_it_sends_is_an_error():
    results = map_in_order(make_killed_while_sending, 1, range(2), 1)
    next(results)  # the worker now processes the next item
    time.sleep(1.0)
    with pytest.raises(InputError, match="killed by signal 9"):
        next(results)


@pytest.mark.parametrize("make", [make_failing, make_unbuildable])
def test_a_bug_in_a_worker_is_not_an_input_error(make, capfd):
    with pytest.raises(RuntimeError, match="see its traceback above"):
        list(map_in_order(make, None, range(20), 2))
    assert "Traceback" in capfd.readouterr().err


def test_an_exception_of_the_items_ends_the_workers():
    def items() -> Iterator[int]:
        yield 1
        raise InputError("bad file")

    with pytest.raises(InputError, match="bad file"):
        list(map_in_order(make_slow_square, 0, items(), 2))
    assert not multiprocessing.active_children()


def test_workers_end_when_their_parent_is_killed(tmp_path):
    program = tmp_path / "parent.py"
    program.write_text(
        "import itertools, os, sys\n"
        "from megatron.preprocessing.workers import map_in_order\n"
        "def make(_):\n"
        "    return lambda item: os.getpid()\n"
        "if __name__ == '__main__':\n"
        "    for pid in map_in_order(make, None, itertools.count(), 2):\n"
        "        print(pid, flush=True)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, program], stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    workers = {int(parent.stdout.readline()) for _ in range(200)}
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]


def test_a_parent_that_ends_in_the_middle_of_a_message(capfd: pytest.CaptureFixture[str]) -> None:
    """As a signal ends it while it sends a batch."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, make_slow_square, 0))
    process.start()
    theirs.close()
    assert ours.recv() is None
    os.write(ours.fileno(), struct.pack("!i", 100) + b"part")
    ours.close()
    process.join()
    assert process.exitcode == 0 and capfd.readouterr().err == ""
