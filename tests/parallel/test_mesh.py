"""The axes of a run: the groups behind them, and what their processes agree on."""

from __future__ import annotations

import pytest
from distributed import run_distributed
from models import CPU

from megatron.parallel.collectives import all_equal, raise_on_all_ranks
from megatron.parallel.config import ParallelConfig
from megatron.parallel.mesh import Axis, Mesh, init_mesh, world_apart

PROCESSES = 4
MINUTES = 7  # a timeout that is nobody's default


def facts() -> dict[str, object]:
    """This process's view of two meshes: two stages of two tensor-parallel processes, and four stages."""
    square, line = (
        ParallelConfig(
            pipeline_model_parallel_size=PROCESSES // tp,
            tensor_model_parallel_size=tp,
            distributed_timeout_minutes=MINUTES,
        )
        for tp in (2, 1)
    )
    with init_mesh(square, CPU) as mesh:
        apart = world_apart(mesh.world, square)
        found = {"timeouts": timeouts(mesh.pp, mesh.tp, apart)} | heartbeats(mesh, apart) | agreement(apart)
    with init_mesh(line, CPU) as mesh:
        return found | {"timeouts of a line": timeouts(mesh.pp, mesh.embedding)}


def timeouts(*axes: Axis) -> list[float | None]:
    """Minutes that each axis's process group waits; None for an axis that has no group here."""
    groups = [axis.group for axis in axes]
    return [g and g._get_backend(CPU).options._timeout.total_seconds() / 60 for g in groups]


def heartbeats(mesh: Mesh, apart: Axis) -> dict[str, object]:
    before = mesh.heartbeat.steps
    all_equal(1, apart)
    stands_still = mesh.heartbeat.steps == before and mesh.heartbeat.communication is None
    all_equal(1, mesh.world)
    return {"heartbeat": (stands_still, mesh.heartbeat.steps - before, apart.heartbeat.steps)}


# Which value is the largest, which the smallest and which process has it must not matter.
VALUES = [(5, 5, 5, 5), (5, 5, 5, 6), (6, 5, 5, 5), (5, 5, 6, 5), (5, 5, 4, 5), (1, 2, 3, 4), (4, 3, 2, 1)]


def agreement(world: Axis) -> dict[str, object]:
    equal, raised = [all_equal(row[world.rank], world) for row in VALUES], None
    try:
        with raise_on_all_ranks(world, ValueError):
            if world.rank == 1:
                raise ValueError("the disk is full")
    except ValueError as error:
        raised = str(error)
    return {"equal": equal, "raised": raised}


@pytest.fixture(scope="module")
def found() -> list[dict]:
    return run_distributed(facts, PROCESSES)


def test_every_group_has_the_timeout_of_the_run(found: list[dict]) -> None:
    """init_device_mesh takes none, and its groups would wait for half an hour."""
    assert [rank["timeouts"] for rank in found] == [[MINUTES] * 3] * PROCESSES
    ends, between = [MINUTES, MINUTES], [MINUTES, None]
    assert [rank["timeouts of a line"] for rank in found] == [ends, between, between, ends]


def test_a_background_thread_has_a_heartbeat_of_its_own(found: list[dict]) -> None:
    """If the thread that saves moved the run's heartbeat, the watchdog would not see that training hangs."""
    assert [rank["heartbeat"] for rank in found] == [(True, 1, 1)] * PROCESSES


def test_equal_values_are_told_from_unequal_ones_on_every_rank(found: list[dict]) -> None:
    assert [rank["equal"] for rank in found] == [[True] + [False] * 6] * PROCESSES


def test_an_error_on_one_rank_is_raised_on_all(found: list[dict]) -> None:
    other = "rank 1 failed; see its message"
    assert [rank["raised"] for rank in found] == [other, "the disk is full", other, other]
