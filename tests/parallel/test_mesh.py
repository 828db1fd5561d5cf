"""Axes of the mesh, their process groups, and agreement across ranks."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed import run_distributed
from models import CPU

from megatron.errors import InputError
from megatron.parallel import mesh
from megatron.parallel.apart import world_apart
from megatron.parallel.collectives import all_equal, all_reduce_sum, raise_on_all_ranks
from megatron.parallel.config import ParallelConfig
from megatron.parallel.mesh import Axis, Mesh, axis_sizes, choose_device, init_mesh, join
from megatron.planner.fakes import fake_mesh

PROCESSES = 4
MINUTES = 7  # differs from all default timeouts


def inspect_meshes() -> dict[str, object]:
    """Inspect two meshes on this rank: PP 2 x TP 2, and PP 4."""
    two_by_two, four_stages = (
        ParallelConfig(
            pipeline_model_parallel_size=PROCESSES // tp,
            tensor_model_parallel_size=tp,
            distributed_timeout_minutes=MINUTES,
        )
        for tp in (2, 1)
    )
    with init_mesh(two_by_two, CPU) as mesh:
        apart = world_apart(mesh.world, two_by_two)
        found = {"timeouts": timeouts(mesh.pp, mesh.tp, apart)} | heartbeats(mesh, apart) | agreement(apart)
    with init_mesh(four_stages, CPU) as mesh:
        # A group across stages, after that of the ends, which only two of the four stages have.
        again = join(mesh.pp.ranks[:3], "pipeline", mesh) if mesh.pp.rank < 3 else None
        found["sum of three stages"] = again and all_reduce_sum(torch.tensor(mesh.pp.rank), again).item()
        return found | {"timeouts of PP 4": timeouts(mesh.pp, mesh.embedding)}


def timeouts(*axes: Axis) -> list[float | None]:
    """Timeout in minutes of each axis's process group; None for an axis of size 1."""
    groups = [(axis.group or dist.group.WORLD) if axis.size > 1 else None for axis in axes]
    return [g and g._get_backend(CPU).options._timeout.total_seconds() / 60 for g in groups]


def heartbeats(mesh: Mesh, apart: Axis) -> dict[str, object]:
    before = mesh.heartbeat.steps
    all_equal(1, apart)
    unchanged = mesh.heartbeat.steps == before and mesh.heartbeat.communication is None
    all_equal(1, mesh.world)
    return {"heartbeat": (unchanged, mesh.heartbeat.steps - before, apart.heartbeat.steps)}


# Covers different ranks with the largest and with the smallest value.
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
    return run_distributed(inspect_meshes, PROCESSES)


def test_a_gpu_that_torch_cannot_use_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training on the CPU in its place would be a hundred times slower, and look right."""
    monkeypatch.setattr(mesh, "NVIDIA_GPUS", tmp_path)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(
        InputError, match=r"^--device auto: .* check the driver \(torch is built for CUDA 13.0\)"
    ):
        choose_device("auto")
    assert choose_device("cpu") == CPU
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert choose_device("auto") == CPU


def test_a_rank_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert choose_device("cuda") == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(InputError, match=r"^torchrun started local rank 2, but this machine has 2 GPU\(s\)$"):
        choose_device("cuda")


def test_a_gpu_of_its_own_for_each_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """With SLURM's --gpus-per-task each process sees one GPU, its own. torchrun's processes all see the same."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert choose_device("auto") == torch.device("cuda", 0)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with pytest.raises(InputError, match=r"^torchrun started local rank 3, but this machine has 1 GPU\(s\)$"):
        choose_device("auto")


def test_every_group_has_the_timeout_of_the_run(found: list[dict]) -> None:
    """Groups do not inherit that of the whole run, and would default to half an hour."""
    assert [rank["timeouts"] for rank in found] == [[MINUTES] * 3] * PROCESSES
    ends, between = [MINUTES, MINUTES], [MINUTES, None]
    assert [rank["timeouts of PP 4"] for rank in found] == [ends, between, between, ends]


def test_stages_make_a_group_after_the_embedding_group(found: list[dict]) -> None:
    assert [rank["sum of three stages"] for rank in found] == [3, 3, 3, None]


def test_a_background_thread_has_its_own_heartbeat(found: list[dict]) -> None:
    """If the saving thread advanced the run's heartbeat, the watchdog would not notice that training hangs."""
    assert [rank["heartbeat"] for rank in found] == [(True, 4, 4)] * PROCESSES


def test_all_equal_agrees_on_every_rank(found: list[dict]) -> None:
    assert [rank["equal"] for rank in found] == [[True] + [False] * 6] * PROCESSES


def test_an_error_on_one_rank_is_raised_on_all(found: list[dict]) -> None:
    other = "rank 1: the disk is full"
    assert [rank["raised"] for rank in found] == [other, "the disk is full", other, other]


def test_instances_are_neighbors_among_the_replicas() -> None:
    """As Megatron-LM divides the data- and context-parallel ranks of TP 2 x CP 2 x DP 4, and those of experts."""
    config = ParallelConfig(
        tensor_model_parallel_size=2,
        context_parallel_size=2,
        expert_model_parallel_size=2,
        expert_tensor_parallel_size=1,
        use_distributed_optimizer=True,
        num_distributed_optimizer_instances=2,
    )
    with fake_mesh(config, CPU, rank=11, processes=16) as mesh:
        assert mesh.dp_cp.parts is not None and mesh.expert_dp.parts is not None
        assert [list(axis.ranks) for axis in mesh.dp_cp.parts] == [[9, 11, 13, 15], [3, 11]]
        assert [list(axis.ranks) for axis in mesh.expert_dp.parts] == [[9, 11, 13, 15], [3, 11]]
    config = dataclasses.replace(config, expert_model_parallel_size=4)
    with pytest.raises(
        InputError, match=r"^--num-distributed-optimizer-instances: 2 does not divide the 1 exp"
    ):
        axis_sizes(config, 4)
