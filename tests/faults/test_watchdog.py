"""Status reports of hung ranks, and the watchdog's cost. Runs that hang are in test_faults.py."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from megatron.faults.rank_status import RankStatus, cause, describe_here, rank_status, summary
from megatron.faults.watchdog import Watchdog
from megatron.parallel.collectives import named
from megatron.parallel.mesh import Axis, Heartbeat, Mesh
from megatron.parallel.rendezvous import rank_names


def waiting(what: str, seconds: float = 30.0) -> RankStatus:
    return RankStatus(what, "wait (collectives.py:66)", seconds, "  the stack of one that waits\n")


def idle(seconds: float = 31.0) -> RankStatus:
    return RankStatus(None, "forward (gpt.py:7)", seconds, "  the stack of one that is idle\n")


def describe_from_a_thread(mesh: Mesh, here: RankStatus) -> str:
    """Describe this process from another thread, as the watchdog does."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(describe_here, mesh, here).result()


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([0, 1], "ranks 0-1"),
        ([7, 2, 0, 1], "ranks 0-2, 7"),
        (range(3072), "ranks 0-3071"),
        (range(0, 3072, 8), "ranks 0, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 104, 112, 120, ..."),
    ],
)
def test_rank_names(ranks, text: str) -> None:
    assert rank_names(ranks) == text


def test_rank_outside_a_communication_is_the_cause() -> None:
    answers = {rank: waiting("all-reduce over the tensor-parallel axis") for rank in range(4)}
    answers[2] = idle()
    assert cause(answers, 4) == "rank 2 is in no communication, in forward (gpt.py:7)"
    assert summary(answers, 4, still=15).splitlines() == [
        "  ranks 0-1, 3: all-reduce over the tensor-parallel axis, for 30 s",
        "  rank 2: no communication, in forward (gpt.py:7), for 31 s",
        "stack of rank 2:",
        "  the stack of one that is idle",
    ]


def test_rank_without_an_answer_is_the_cause() -> None:
    answers = {0: waiting("receive over the pipeline axis"), 2: idle(seconds=0.1)}
    assert cause(answers, 4).startswith("ranks 1, 3 gave no answer: they have ended or are stopped")
    assert summary(answers, 4, still=15).splitlines() == [
        "  rank 0: receive over the pipeline axis, for 30 s",
        "  rank 2: no communication, in forward (gpt.py:7), for 0 s",
        "  ranks 1, 3: no answer",
    ]


def test_ranks_that_wait_for_each_other() -> None:
    answers = {
        0: waiting("all-reduce over the data-parallel axis"),
        1: waiting("all-gather over the whole run axis"),
    }
    assert cause(answers, 2) == "every rank waits in a communication"
    assert len(summary(answers, 2, still=15).splitlines()) == 2


def test_summary_of_thousands_of_ranks_is_short() -> None:
    answers = {
        rank: waiting(f"{'send' if rank < 1024 else 'receive'} over the pipeline axis")
        for rank in range(3072)
    }
    answers |= {rank: idle() for rank in range(512, 520)}
    del answers[3000]
    text = summary(answers, 3072, still=15)
    assert len(text.splitlines()) == 4 + 3 * 2
    assert "  ranks 0-511, 520-1023: send over the pipeline axis" in text
    assert cause(answers, 3072).startswith("rank 3000 gave no answer: it has")


def test_communications_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    heartbeat = Heartbeat()
    axis = Axis(1, 3, name="data-parallel", ranks=(0, 4, 8), heartbeat=heartbeat)
    mesh = Mesh(
        torch.device("cpu"), world=Axis(4, 9, ranks=tuple(range(9)), heartbeat=heartbeat), heartbeat=heartbeat
    )
    with named("all-reduce", axis):
        here = rank_status(mesh, 12.0)
        text = describe_from_a_thread(mesh, here)
    assert str(here) == "all-reduce over the data-parallel axis"
    assert text.startswith(
        "rank 4: all-reduce over the data-parallel axis, waiting for ranks 0, 8, for 12 s\n"
    )
    assert heartbeat.steps == 1
    assert str(rank_status(mesh, 0.0)).startswith("no communication, in rank_status (rank_status.py:")
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 4)
    with pytest.raises(RuntimeError, match=r"for ranks 0, 8; one of them is lost"), named("all-reduce", axis):
        raise RuntimeError("connection closed")
    assert heartbeat.communication == ("all-reduce", axis), "a failed communication stays recorded"


def test_all_threads_are_listed_main_thread_first() -> None:
    leave = threading.Event()

    def sleeps_elsewhere() -> None:
        leave.wait()

    other = threading.Thread(target=sleeps_elsewhere, name="a loader")
    other.start()
    try:
        mesh = Mesh(torch.device("cpu"))
        lines = describe_from_a_thread(mesh, rank_status(mesh, 1.0)).splitlines()
    finally:
        leave.set()
        other.join()
    threads = [line for line in lines if line.startswith("  thread ")]
    assert threads[0] == "  thread MainThread:" and "  thread a loader:" in threads
    assert any("in sleeps_elsewhere" in line for line in lines)
    assert not any("in describe_here" in line for line in lines)


def test_recording_a_communication_is_cheap() -> None:
    """A step of a 32-layer model makes about 500 communications per microbatch."""
    axis = Axis(0, 2, name="tensor-parallel", ranks=(0, 1))
    begin = time.perf_counter()
    for _ in range(10_000):
        with named("all-reduce", axis):
            pass
    assert (time.perf_counter() - begin) / 10_000 < 50e-6


def test_watchdog_thread_ends_with_its_context() -> None:
    before = threading.active_count()
    with Watchdog(Mesh(torch.device("cpu")), 60):
        assert threading.active_count() == before + 1
    assert threading.active_count() == before
