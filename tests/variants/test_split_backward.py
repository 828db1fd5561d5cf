"""Gradients of pipeline schedules against those of torch.distributed.pipelining, in fp64 over gloo."""

from __future__ import annotations

import dataclasses
import itertools
import weakref

import pytest
import torch
from distributed import run_distributed
from models import CPU
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage as TorchStage
from torch.distributed.pipelining import schedules as torch_schedules

import megatron.plugins  # noqa: F401 (registers the schedules)
from megatron.model.layers import _linear
from megatron.ops.backend import PLAIN
from megatron.parallel.config import ParallelConfig
from megatron.parallel.mesh import Mesh, init_mesh, world_size
from megatron.parallel.pipeline import PipelineStage, WgradQueue, run_schedule
from megatron.parallel.schedules import (
    CHUNKED,
    SCHEDULES,
    SPLIT,
    V_SHAPED,
    BackwardWeight,
    part_of,
    with_transfers,
)
from megatron.parallel.transfers import Transfers

ROWS, WIDTH = 3, 8
# Ours, and torch's class of that schedule.
NAMES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "breadth-first": "ScheduleLoopedBFS",
    "zb-h1": "ScheduleInterleavedZeroBubble",
    "zb-h2": "ScheduleInterleavedZeroBubble",
    "zb-v": "ScheduleZBVZeroBubble",
    "v-half": "ScheduleZBVZeroBubble",
    "v-min": "ScheduleZBVZeroBubble",
    "dualpipe-v": "ScheduleDualPipeV",
}


class Chunk(nn.Module):
    """tanh(x Wᵀ) twice; `apply` replaces the product."""

    def __init__(self, part: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(part)
        self.weights = nn.ParameterList(
            torch.randn(WIDTH, WIDTH, dtype=torch.float64, generator=generator) for _ in range(2)
        )

    def forward(self, x: Tensor, product=nn.functional.linear) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(product(x, weight))
        return x


class Ours(PipelineStage):
    """Chunks of a rank, whose weight gradients go to `main_grad`, as those of our layers do."""

    def __init__(self, chunks: list[Chunk], batch: Tensor, last: int | None) -> None:
        wgrads = WgradQueue()
        super().__init__(torch.float64, wgrads)
        self.chunks, self.batch, self.last = chunks, batch, last
        self.ops = dataclasses.replace(PLAIN, accumulate_wgrad=wgrads.deferring(PLAIN.accumulate_wgrad))
        for weight in (weight for chunk in chunks for weight in chunk.weights):
            weight.main_grad = torch.zeros_like(weight, requires_grad=False)

    def recv_shape(self, microbatch: int) -> tuple[int, ...]:
        return ROWS, WIDTH

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        return _linear(x, weight, None, self.ops)

    def compute(self, chunk: int, microbatch: int, x: Tensor | None) -> Tensor:
        rows = self.batch[microbatch * ROWS : (microbatch + 1) * ROWS]
        out = self.chunks[chunk](rows if x is None else x, self.product)
        return out.square().sum() if chunk == self.last else out


def ours(name: str, mesh: Mesh, batch: Tensor) -> list[Tensor]:
    stages, rank, chunks = mesh.pp.size, mesh.pp.rank, 2 if name in CHUNKED else 1
    v_shaped = name in V_SHAPED
    parts = [part_of(rank, chunk, stages, v_shaped) for chunk in range(chunks)]
    last = chunks - 1 if parts[-1] == stages * chunks - 1 else None
    stage = Ours([Chunk(part) for part in parts], batch, last)
    lists = SCHEDULES[name](stages, chunks, len(batch) // ROWS)
    assert any(isinstance(a, BackwardWeight) for row in lists for a in row) == (name in SPLIT)
    transfers = Transfers(mesh, scatter_gather=False)
    run_schedule(stage, with_transfers(lists, stages, v_shaped)[rank], transfers)
    transfers.finish()
    assert not stage.wgrads.waiting and not stage.roots and not stage.inputs
    return [weight.main_grad for chunk in stage.chunks for weight in chunk.weights]


def test_waiting_products_keep_no_input_of_a_pass() -> None:
    """They keep the values that they multiply; a graph would keep the received input and its gradient, too."""
    stage = Ours([Chunk(1)], torch.zeros(ROWS, WIDTH), None)
    x = torch.ones(ROWS, WIDTH, dtype=torch.float64)
    kept = weakref.ref(x)
    out = stage.forward(0, 0, x)
    del x
    with stage.wgrads.split((0, 0)):
        stage.backward(0, 0, torch.ones_like(out))
    assert kept() is None
    assert not any(weight.main_grad.any() for weight in stage.chunks[0].weights)
    stage.wgrads.run((0, 0))
    assert all(weight.main_grad.any() for weight in stage.chunks[0].weights)


def theirs(name: str, mesh: Mesh, batch: Tensor) -> list[Tensor]:
    stages, rank, chunks = mesh.pp.size, mesh.pp.rank, 2 if name in CHUNKED else 1
    parts = [part_of(rank, chunk, stages, name in V_SHAPED) for chunk in range(chunks)]
    modules = [Chunk(part) for part in parts]
    torch_stages = [
        TorchStage(module, part, stages * chunks, mesh.device)
        for module, part in zip(modules, parts, strict=True)
    ]
    kind = getattr(torch_schedules, NAMES[name])
    single = name in ("gpipe", "1f1b")
    schedule = kind(
        torch_stages[0] if single else torch_stages,
        len(batch) // ROWS,
        loss_fn=lambda out, _: out.square().sum(),
        scale_grads=False,
    )
    inputs = (batch,) if 0 in parts else ()
    target = {"target": batch} if stages * chunks - 1 in parts else {}
    schedule.step(*inputs, **target)
    return [weight.grad for module in modules for weight in module.weights]


def differences(names: list[str], microbatches: list[int]) -> dict[tuple[str, int], float]:
    """Largest difference of this rank's gradients, by schedule and microbatches."""
    config = ParallelConfig(pipeline_model_parallel_size=world_size())
    found = {}
    with init_mesh(config, CPU) as mesh:
        for name, count in itertools.product(names, microbatches):
            generator = torch.Generator().manual_seed(count)
            batch = torch.randn(count * ROWS, WIDTH, dtype=torch.float64, generator=generator)
            pairs = zip(ours(name, mesh, batch), theirs(name, mesh, batch), strict=True)
            found[name, count] = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
    return found


@pytest.mark.parametrize(
    ("stages", "names", "microbatches"),
    [
        (2, ["zb-h1", "zb-v", "v-min", "dualpipe-v"], [4]),
        pytest.param(2, list(NAMES), [4, 8], marks=pytest.mark.slow),
        pytest.param(4, list(NAMES), [8, 12], marks=pytest.mark.slow),
    ],
)
def test_same_gradients_as_torchs_schedule(stages: int, names: list[str], microbatches: list[int]) -> None:
    for found in run_distributed(differences, stages, names, microbatches):
        assert len(found) == len(names) * len(microbatches)
        assert max(found.values()) < 1e-8, found
