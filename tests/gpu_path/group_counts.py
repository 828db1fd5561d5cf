"""Process groups of a run of any size, counted on one process.

PYTHONPATH=.:tests python tests/gpu_path/group_counts.py

Prints the table of docs/launching.md.
"""

from __future__ import annotations

import dataclasses
import tracemalloc
from typing import Any

import pytest
import torch.distributed as dist
from gpu_path.recorded_step import recorded_mesh

from megatron.arguments import parse_run_config
from megatron.parallel import mesh

# Ranks, tensor-parallel size and stages.
RUNS = [(8, 2, 2), (1024, 8, 4), (16384, 8, 16)]
FLAGS = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 99 --num-layers 16 --hidden-size 64
    --num-attention-heads 8 --seq-length 8 --micro-batch-size 1 --train-iters 1 --lr 1 --device cpu
"""


@dataclasses.dataclass(frozen=True)
class GroupCounts:
    """Groups of rank 0, the process that is in the most of them.

    Attributes:
        communicators: groups of more than one rank that the process is in, each an NCCL communicator.
        splits: times that all processes split the communicator of the whole run. A mesh splits once for each axis, and
            `new_group` once for each group.
        peers: gloo connections, to every other rank of each group; each needs a file descriptor.
        kilobytes: Python's memory of the groups.
    """

    communicators: int
    splits: int
    peers: int
    kilobytes: int


def count(ranks: int, tensor: int, stages: int) -> GroupCounts:
    """Count the groups of a run."""
    config = parse_run_config(
        f"{FLAGS} --tensor-model-parallel-size {tensor} --pipeline-model-parallel-size {stages} "
        f"--global-batch-size {ranks // tensor // stages}".split(),
        description="",
        defaults={},
    )
    splits = 0
    new_group, init_device_mesh = dist.new_group, mesh.init_device_mesh

    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal splits
        splits += 1
        return new_group(*arguments, **named)

    def mesh_of(*arguments: Any, **named: Any) -> Any:
        nonlocal splits
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(dist, "new_group", new_group)
            made = init_device_mesh(*arguments, **named)
        splits += made.ndim
        return made

    tracemalloc.start()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "new_group", counted)
            patch.setattr(mesh, "init_device_mesh", mesh_of)
            with recorded_mesh(config, 0, ranks) as (_, record):
                memory, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    sizes = [len(group) for group, last in record.groups.items() for _ in range(last + 1) if len(group) > 1]
    return GroupCounts(len(sizes), splits, sum(size - 1 for size in sizes), memory // 1000)


def table() -> list[str]:
    """Rows of the table in docs/launching.md."""
    rows = []
    for ranks, tensor, stages in RUNS:
        counts = count(ranks, tensor, stages)
        layout = f"T{tensor} P{stages} D{ranks // tensor // stages}"
        rows.append(
            f"| {ranks:,} | {layout} | {counts.communicators} | {counts.splits:,} | {counts.peers:,} |"
        )
    return rows


if __name__ == "__main__":
    print("\n".join(table()))
