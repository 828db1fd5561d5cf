"""Process groups of a run on GPUs of any size, counted on one process.

PYTHONPATH=.:tests python tests/gpu_path/group_counts.py

Prints the table of docs/launching.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.arguments import parse_run_config
from megatron.inference.in_training import replica_mesh
from megatron.model.context import ModelContext
from megatron.ops.backend import PLAIN
from megatron.parallel import mesh
from megatron.parallel.apart import world_apart

# Ranks, tensor-parallel size and stages.
RUNS = [(8, 1, 1), (8, 2, 2), (1024, 1, 4), (1024, 8, 4), (16384, 1, 1), (16384, 8, 16)]
FLAGS = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 99 --num-layers 16 --hidden-size 64
    --num-attention-heads 8 --seq-length 8 --micro-batch-size 1 --train-iters 1 --lr 1 --device cpu
"""


@dataclasses.dataclass(frozen=True)
class Group:
    """A process group as it is made.

    Attributes:
        backend: "gloo" or "nccl"; both, as "cpu:gloo,cuda:nccl", before a group had one.
        is_member: this rank is one of its ranks.
        takes_all: every process of the run must take part in making it.
    """

    backend: str
    ranks: tuple[int, ...]
    is_member: bool
    takes_all: bool


@dataclasses.dataclass(frozen=True)
class GroupCounts:
    """Largest numbers of a few processes of a run.

    Attributes:
        communicators: NCCL communicators of a process.
        for_all: groups besides that of the whole run that every process takes part in making.
        connections: gloo's, each of which takes a file descriptor: to the ranks that this one exchanges messages with.
        kilobytes: Python's memory of the groups.
    """

    communicators: int
    for_all: int
    connections: int
    kilobytes: int

    @classmethod
    def of(cls, groups: list[Group], memory: int) -> GroupCounts:
        mine = [group for group in groups if group.is_member]
        return cls(
            communicators=sum("nccl" in group.backend for group in mine),
            for_all=sum(group.takes_all for group in groups),
            connections=sum(connections(len(group.ranks)) for group in mine if "gloo" in group.backend),
            kilobytes=memory // 1000,
        )


def connections(size: int) -> int:
    """Ranks of a gloo group that its first rank communicates with: agreements, gathers and sums in a ring, broadcasts
    from the first rank."""
    distances = [2**i for i in range((size - 1).bit_length())]
    return len({distance % size for d in distances for distance in (d, -d)})


@contextlib.contextmanager
def recorded_groups(rank: int, ranks: int) -> Iterator[list[Group]]:
    """Record the groups that a process of a run of `ranks` makes. They communicate nothing."""
    made: list[Group] = []
    init, new_group = dist.init_process_group, distributed_c10d._new_group_with_tag

    def start(backend: str, **settings: Any) -> None:
        made.append(Group(backend, tuple(range(ranks)), True, False))
        init("fake", **settings | {"device_id": None})

    def make(
        members: list[int] | None, timeout: Any, backend: str | None, *more: Any, **settings: Any
    ) -> Any:
        members = list(range(ranks)) if members is None else members
        local = settings["use_local_synchronization"]
        # NCCL connects when the group is made, not within the first step.
        assert backend != "nccl" or settings["device_id"] == torch.device("cuda", 0)
        made.append(Group(backend or made[0].backend, tuple(members), rank in members, not local))
        return new_group(members, timeout, None, *more, **settings | {"device_id": None})

    with pytest.MonkeyPatch.context() as patch:
        environment = {"RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "host", "MASTER_PORT": 1}
        for name, value in environment.items():
            patch.setenv(name, str(value))
        patch.setattr(mesh, "meet", lambda *_: FakeStore())
        patch.setattr(dist, "init_process_group", start)
        patch.setattr(distributed_c10d, "_new_group_with_tag", make)
        yield made


def count_process(rank: int, ranks: int, tensor: int, stages: int) -> GroupCounts:
    """Count the groups of a process of a run on GPUs, with fewer query groups than tensor-parallel ranks, that saves
    in the background and samples texts."""
    config = parse_run_config(
        f"{FLAGS} --tensor-model-parallel-size {tensor} --pipeline-model-parallel-size {stages} "
        f"--global-batch-size {ranks // tensor // stages} --group-query-attention --num-query-groups 2".split(),
        description="",
        defaults={},
    )
    with recorded_groups(rank, ranks) as groups:
        tracemalloc.start()
        try:
            with mesh.init_mesh(config.parallel, torch.device("cuda", 0)) as found:
                sizes = {"vocab_size": 99, "padded_vocab_size": 128}
                held = [
                    ModelContext.on_mesh(found, config.model, config.parallel, ops=PLAIN, **sizes),
                    world_apart(found.world, config.parallel),
                    replica_mesh(found),
                ]
                memory, _ = tracemalloc.get_traced_memory()
                del held
        finally:
            tracemalloc.stop()
    return GroupCounts.of(groups, memory)


@functools.cache
def count(ranks: int, tensor: int, stages: int) -> GroupCounts:
    """Largest counts of the first rank, one of the second stage, and the last."""
    found = [
        dataclasses.astuple(count_process(rank, ranks, tensor, stages))
        for rank in (0, ranks // stages % ranks, ranks - 1)
    ]
    return GroupCounts(*map(max, zip(*found, strict=True)))


def table() -> list[str]:
    """Rows of the table in docs/launching.md."""
    rows = []
    for ranks, tensor, stages in RUNS:
        counts = count(ranks, tensor, stages)
        layout = f"T{tensor} P{stages} D{ranks // tensor // stages}"
        rows.append(f"| {ranks:,} | {layout} | {counts.communicators} | {counts.connections} |")
    return rows


if __name__ == "__main__":
    for run in RUNS:
        print(run, count(*run))
    print("\n".join(table()))
