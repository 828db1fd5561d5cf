"""The executor of pipeline schedules on real processes."""

from __future__ import annotations

import time

import pytest
import torch
from distributed import run_distributed
from models import CPU
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.parallel.config import ParallelConfig
from megatron.parallel.mesh import init_mesh
from megatron.parallel.pipeline import PipelineStage, run_schedule
from megatron.parallel.schedules import forward_only, with_transfers
from megatron.parallel.transfers import MAX_PENDING_SENDS, Transfers
from megatron.variants.schedules import gpipe

MICROBATCHES = 12


class Multiply(PipelineStage):
    """Multiplies by a weight; the second stage sums. Counts the first stage's outputs that are still allocated."""

    def __init__(self) -> None:
        super().__init__(torch.float32)
        self.weight = torch.ones(1000, requires_grad=True)
        self.counts: list[int] = []
        self.outputs: list[StorageWeakRef] = []

    def recv_shape(self, microbatch: int) -> tuple[int, ...]:
        return (1000,)

    def compute(self, chunk: int, microbatch: int, x: torch.Tensor | None) -> torch.Tensor:
        if x is not None:
            return (x * self.weight).sum()
        time.sleep(0.1)  # time for earlier sends to arrive
        self.counts.append(sum(not output.expired() for output in self.outputs))
        # Backward saves the factor, not the product.
        out = torch.full((1000,), float(microbatch)) * self.weight
        self.outputs.append(StorageWeakRef(out.untyped_storage()))
        return out


def outputs_alive() -> list[int]:
    """Number of first-stage outputs that are still allocated, at each forward pass."""
    with init_mesh(ParallelConfig(pipeline_model_parallel_size=2), CPU) as mesh:
        stage = Multiply()
        actions = with_transfers(gpipe(2, 1, MICROBATCHES), 2)[mesh.pp.rank]
        transfers = Transfers(mesh, scatter_gather=False)
        run_schedule(stage, actions, transfers)
        transfers.finish()
    assert all(output.expired() for output in stage.outputs)
    return stage.counts


def test_outputs_are_freed_once_sent() -> None:
    """GPipe runs all forward passes first and must not keep outputs that were sent."""
    first_stage = run_distributed(outputs_alive, 2)[0]
    assert len(first_stage) == MICROBATCHES and max(first_stage) <= MAX_PENDING_SENDS


class AddOne(PipelineStage):
    """Adds one to microbatches of different sizes in every chunk; records the outputs of the last chunk."""

    def __init__(self, sizes: list[int], last_chunk: int | None) -> None:
        super().__init__(torch.float32)
        self.sizes, self.last_chunk = sizes, last_chunk
        self.results: list[list[float]] = []

    def recv_shape(self, microbatch: int) -> tuple[int, ...]:
        return (self.sizes[microbatch],)

    def compute(self, chunk: int, microbatch: int, x: torch.Tensor | None) -> torch.Tensor:
        x = torch.arange(float(self.sizes[microbatch])) if x is None else x
        if chunk == self.last_chunk:
            self.results.append((x + 1).tolist())
        return x + 1


def through_all_stages(chunks: int, sizes: list[int]) -> list[list[float]]:
    with init_mesh(ParallelConfig(pipeline_model_parallel_size=3), CPU) as mesh:
        stage = AddOne(sizes, chunks - 1 if mesh.pp.rank == 2 else None)
        actions = with_transfers(forward_only(3, chunks, len(sizes)), 3)[mesh.pp.rank]
        with torch.no_grad():
            transfers = Transfers(mesh, scatter_gather=False)
            run_schedule(stage, actions, transfers)
            transfers.finish()
    return stage.results


@pytest.mark.parametrize("chunks", [1, 2])
def test_microbatches_may_be_short_or_empty(chunks: int) -> None:
    sizes = [4, 4, 4, 4, 3, 0, 1]
    results = run_distributed(through_all_stages, 3, chunks, sizes)[2]
    assert results == [[i + 3.0 * chunks for i in range(size)] for size in sizes]
