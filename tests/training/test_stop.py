"""Stopping early: all processes stop after the same iteration, whichever of them was asked to."""

from __future__ import annotations

import os
import signal

from distributed import run_distributed
from models import CPU

from megatron.parallel.config import ParallelConfig
from megatron.parallel.mesh import init_mesh
from megatron.training.config import TrainingConfig
from megatron.training.stop import StopRequests


def reasons(asked: int) -> tuple[list[str | None], list[int]]:
    """The answers and exit codes of two runs: `asked` gets SIGUSR1 in the first, and is out of time in the second."""
    config = TrainingConfig(micro_batch_size=1, train_iters=9, exit_duration_in_mins=2)
    with init_mesh(ParallelConfig(), CPU) as mesh:
        mine = mesh.world.rank == asked
        with StopRequests(config, mesh) as stop:
            answers = [stop.reason(1)]
            if mine:
                os.kill(os.getpid(), signal.SIGUSR1)
            answers.append(stop.reason(2))
        codes = [stop.exit_code]
        with StopRequests(config, mesh) as stop:
            stop.started -= 121 if mine else 0
            answers.append(stop.reason(1))
        return answers, [*codes, stop.exit_code]


def test_all_processes_stop_when_one_is_asked_to() -> None:
    said = [None, "SIGUSR1 was received", "--exit-duration-in-mins 2 is over"]
    assert run_distributed(reasons, 2, 1) == [(said, [128 + signal.SIGUSR1, 0])] * 2
