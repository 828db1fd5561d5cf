"""Process groups, connections, file descriptors and memory of a process at up to 16,384 ranks."""

from __future__ import annotations

import collections
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed import run_distributed
from gpu_path.group_counts import RUNS, connections, count, recorded_groups, table
from models import CPU

from megatron.parallel import mesh
from megatron.parallel.collectives import broadcast, gather_texts, host_max
from megatron.parallel.config import ParallelConfig
from megatron.parallel.mesh import init_mesh

LAUNCHING = Path(__file__).resolve().parents[2] / "docs" / "launching.md"
PROCESSES = 12
# Files of a gloo group besides connections.
GLOO = 4


def test_the_table_of_the_page() -> None:
    text = LAUNCHING.read_text(encoding="utf-8")
    for row in table():
        assert row in text


@pytest.mark.parametrize(("ranks", "tensor", "stages"), RUNS)
def test_a_process_of_a_large_run(ranks: int, tensor: int, stages: int) -> None:
    found = count(ranks, tensor, stages)
    axes = [size for size in (tensor, stages, ranks // tensor // stages) if size > 1]
    # Each axis of more than one rank, and groups of tied embeddings and of shared keys and values.
    assert found.communicators == len(axes) + (stages > 2) + (tensor > 2)
    # The group of the thread that saves, and the group of the replica that samples texts.
    assert found.for_all == 1 + (tensor * stages > 1)
    # The whole run twice, and a replica of 128 ranks at most.
    assert found.connections <= 2 * connections(ranks) + connections(128)
    assert found.kilobytes <= 50 + 0.35 * ranks  # maps of ranks


def test_connections_grow_as_a_logarithm() -> None:
    assert [connections(size) for size in (2, 3, 8, 1024, 16384)] == [1, 2, 5, 19, 27]


def test_further_groups_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    sound, join = count(8, 2, 2), mesh.join

    def twice(*arguments):
        mesh.dist.new_group(list(range(8)))
        return join(*arguments)

    monkeypatch.setattr(mesh, "join", twice)
    found = count.__wrapped__(8, 2, 2)
    assert (found.for_all, found.connections) == (
        sound.for_all + 4,  # tensor, context, pipeline and data
        sound.connections + 4 * connections(8),
    )


def test_only_the_ranks_of_a_group_make_and_destroy_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of a group do both in the same order, so that none waits forever for another."""
    ranks, made, destroyed = 24, {}, {}
    config = ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=4)
    destroy = dist.destroy_process_group
    for rank in range(ranks):
        found = destroyed[rank] = collections.deque()

        def record(group: object = None, found: collections.deque = found) -> None:
            if group is not None:
                found.append(tuple(dist.get_process_group_ranks(group)))
            destroy(group)

        monkeypatch.setattr(dist, "destroy_process_group", record)
        with recorded_groups(rank, ranks) as groups, init_mesh(config, torch.device("cuda", 0)):
            made[rank] = groups[1:]
        assert all(group.is_member and group.backend == "nccl" for group in made[rank])
        assert sorted(found) == sorted(group.ranks for group in made[rank])
    for groups in made.values():
        for group in groups:
            # A group's name has the number of groups that its ranks have made before it.
            assert len({made[rank].index(group) for rank in group.ranks}) == 1
    assert not stuck(destroyed)


def stuck(queues: dict[int, collections.deque]) -> bool:
    """True if ranks wait for each other forever, when each communicates over the groups of its queue in order."""
    while heads := [queue[0] for queue in queues.values() if queue]:
        ready = [group for group in heads if all(queues[rank] and queues[rank][0] == group for rank in group)]
        if not ready:
            return True
        for rank in ready[0]:
            queues[rank].popleft()
    return False


def descriptors() -> int:
    """Files that a process has opened when it has joined the run and exchanged values of the host in every way."""
    files = lambda: len(os.listdir("/proc/self/fd"))  # noqa: E731
    before = files()
    with init_mesh(ParallelConfig(), CPU) as mesh:
        host_max([mesh.world.rank], mesh.world)
        gather_texts("x", mesh.world)
        broadcast(torch.ones(1), mesh.world)
        return files() - before


def test_ranks_that_wait_for_each_other_are_found() -> None:
    order = {0: ["01", "02"], 1: ["13", "01"], 2: ["02", "23"], 3: ["23", "13"]}
    queues = {r: collections.deque(tuple(map(int, group)) for group in groups) for r, groups in order.items()}
    assert stuck(queues)


def test_gloo_connects_only_ranks_that_exchange_messages() -> None:
    """Connections of the whole run would be N - 1, above a limit of 1,024 open files from 1,000 ranks on."""
    for rank, opened in enumerate(run_distributed(descriptors, PROCESSES)):
        store = PROCESSES + 10 if rank == 0 else 1
        assert opened <= store + GLOO + connections(PROCESSES), (rank, opened)
