"""Early stop: all processes stop after the same iteration if one of them is asked to."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from distributed import run_distributed
from models import CPU

from megatron.parallel.config import ParallelConfig
from megatron.parallel.mesh import Mesh, init_mesh
from megatron.training.stop import StopRequests


def reasons(asked: int) -> tuple[list[str | None], int, bool]:
    """Return two stop reasons, the exit code, and if all know the time of the slowest.

    `asked` receives SIGUSR1 between the two, and has run two minutes longer.
    """
    with init_mesh(ParallelConfig(), CPU) as mesh:
        is_asked = mesh.world.rank == asked
        with StopRequests(mesh) as stop:
            stop.started -= 121 if is_asked else 0
            answers = [stop.reason()]
            if is_asked:
                os.kill(os.getpid(), signal.SIGUSR1)
            answers.append(stop.reason())
        return answers, stop.exit_code, stop.elapsed >= 121


@pytest.fixture
def default_sighup() -> Iterator[None]:
    """Undo nohup's ignoring of SIGHUP, which the tests themselves may run under."""
    previous = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, previous)


@pytest.mark.usefixtures("default_sighup")
def test_sighup_and_the_end_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    with StopRequests(Mesh(device=CPU)) as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.reason() == "SIGHUP was received or torchrun ended"
    assert stop.exit_code == 129
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with StopRequests(Mesh(device=CPU)) as stop:
        assert stop.reason() is None
        monkeypatch.setattr(os, "getppid", lambda: 1)
        assert stop.reason() == "SIGHUP was received or torchrun ended"
    assert stop.exit_code == 129


def test_ignored_signals_stay_ignored() -> None:
    """As under nohup."""
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequests(Mesh(device=CPU)) as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.reason() is None and stop.exit_code == 0
    finally:
        signal.signal(signal.SIGHUP, previous)


def test_all_processes_stop_when_one_is_asked_to() -> None:
    expected = ([None, "SIGUSR1 was received"], 128 + signal.SIGUSR1, True)
    assert run_distributed(reasons, 2, 1) == [expected] * 2
