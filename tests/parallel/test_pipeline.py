"""The executor of pipeline schedules, on real processes."""

from __future__ import annotations

import time

import pytest
import torch
from distributed import run_distributed
from models import CPU
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.parallel.config import ParallelConfig
from megatron.parallel.mesh import init_mesh
from megatron.parallel.pipeline import BEHIND, Transfers, run_schedule
from megatron.parallel.schedules import SCHEDULES, forward_only, with_transfers

MICROBATCHES = 12


def outputs_alive() -> list[int]:
    """How many outputs of the first stage hold memory, each time that one more is computed."""
    counts, outputs = [], []
    with init_mesh(ParallelConfig(pipeline_model_parallel_size=2), CPU) as mesh:
        weight = torch.ones(1000, requires_grad=True)

        def compute(chunk: int, microbatch: int, x: torch.Tensor | None) -> torch.Tensor:
            if x is not None:
                return (x * weight).sum()
            time.sleep(0.1)  # for what was sent to arrive
            counts.append(sum(not output.expired() for output in outputs))
            out = (
                torch.full((1000,), float(microbatch)) * weight
            )  # backward needs the factor, not the product
            outputs.append(StorageWeakRef(out.untyped_storage()))
            return out

        actions = with_transfers(SCHEDULES["gpipe"](2, 1, MICROBATCHES), 2)[mesh.pp.rank]
        transfers = Transfers(mesh, scatter_gather=False)
        run_schedule(actions, compute, transfers, shape=lambda _: (1000,), dtype=torch.float32)
    assert all(output.expired() for output in outputs)
    return counts


def test_outputs_are_freed_once_sent() -> None:
    """GPipe runs all forward passes first; what it keeps of them does not include what was sent."""
    first_stage = run_distributed(outputs_alive, 2)[0]
    assert len(first_stage) == MICROBATCHES and max(first_stage) <= BEHIND


def through_all_stages(chunks: int, sizes: list[int]) -> list[list[float]]:
    """What comes out of a pipeline whose every chunk adds one, for microbatches of different sizes."""
    results: list[list[float]] = []
    with init_mesh(ParallelConfig(pipeline_model_parallel_size=3), CPU) as mesh:

        def compute(chunk: int, microbatch: int, x: torch.Tensor | None) -> torch.Tensor:
            x = torch.arange(float(sizes[microbatch])) if x is None else x
            if mesh.pp.rank == 2 and chunk == chunks - 1:
                results.append((x + 1).tolist())
            return x + 1

        actions = with_transfers(forward_only(3, chunks, len(sizes)), 3)[mesh.pp.rank]
        with torch.no_grad():
            transfers = Transfers(mesh, scatter_gather=False)
            run_schedule(actions, compute, transfers, shape=lambda i: (sizes[i],), dtype=torch.float32)
    return results


@pytest.mark.parametrize("chunks", [1, 2])
def test_microbatches_may_be_short_or_empty(chunks: int) -> None:
    sizes = [4, 4, 4, 4, 3, 0, 1]
    results = run_distributed(through_all_stages, 3, chunks, sizes)[2]
    assert results == [[i + 3.0 * chunks for i in range(size)] for size in sizes]
