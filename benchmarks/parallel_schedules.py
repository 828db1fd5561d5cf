"""Compare pipeline schedules with those of torch.distributed.pipelining, with simulated stages over gloo.

Stages sleep instead of computing, so four processes do not need four cores.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from parallel_workers import Workers
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from megatron.parallel.config import ParallelConfig
from megatron.parallel.mesh import Mesh, init_mesh
from megatron.parallel.pipeline import PipelineStage as OurStage
from megatron.parallel.pipeline import run_schedule
from megatron.parallel.schedules import one_forward_one_backward, with_transfers
from megatron.parallel.transfers import Transfers
from megatron.planner.schedule_costs import bubble_fraction
from megatron.variants.schedules import gpipe, interleaved

STAGES = 4
FORWARD, BACKWARD = 0.02, 0.04  # seconds per stage and microbatch
SHAPE = (64, 1, 64)  # of the activations between stages; small, because transfer time is not measured
SCHEDULES = {"gpipe": gpipe, "1f1b": one_forward_one_backward, "interleaved": interleaved}
CHUNKS = {"gpipe": 1, "1f1b": 1, "interleaved": 2}
MICROBATCHES = (2 * STAGES, 4 * STAGES)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, chunks: int) -> Tensor:
        ctx.chunks = chunks
        time.sleep(FORWARD / chunks)
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(BACKWARD / ctx.chunks)
        return grad.clone(), None


class SleepingStage(nn.Module):
    """One of `chunks` model chunks of a rank."""

    def __init__(self, chunks: int) -> None:
        super().__init__()
        self.chunks = chunks
        self.weight = nn.Parameter(torch.zeros(SHAPE[-1]))

    def forward(self, x: Tensor) -> Tensor:
        return _Sleep.apply(x + self.weight, self.chunks)


class Stage(OurStage):
    """The sleeping model chunks of a rank. `is_last` is True on the last rank."""

    def __init__(self, chunks: int, is_last: bool) -> None:
        super().__init__(torch.float32)
        self.chunks, self.is_last = [SleepingStage(chunks) for _ in range(chunks)], is_last
        self.x = torch.zeros(SHAPE)

    def recv_shape(self, microbatch: int) -> tuple[int, ...]:
        return SHAPE

    def compute(self, chunk: int, microbatch: int, x: Tensor | None) -> Tensor:
        out = self.chunks[chunk](self.x if x is None else x)
        return out.sum() if self.is_last and chunk == len(self.chunks) - 1 else out


def ours(name: str, microbatches: int, mesh: Mesh) -> Callable[[], None]:
    """Return a function that runs the schedule once."""
    chunks = CHUNKS[name]
    actions = with_transfers(SCHEDULES[name](STAGES, chunks, microbatches), STAGES)[mesh.pp.rank]
    stage, transfers = Stage(chunks, mesh.pp.rank == STAGES - 1), Transfers(mesh, scatter_gather=False)

    def run() -> None:
        run_schedule(stage, actions, transfers)
        transfers.finish()

    return run


def torch_pipelining(name: str, microbatches: int, mesh: Mesh) -> Callable[[], None]:
    """Return a function that runs the schedule of torch.distributed.pipelining once."""
    chunks, rank = CHUNKS[name], mesh.pp.rank
    stages = [
        PipelineStage(SleepingStage(chunks), chunk * STAGES + rank, chunks * STAGES, mesh.device)
        for chunk in range(chunks)
    ]
    kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}[name]
    schedule = kind(
        stages if chunks > 1 else stages[0], microbatches, loss_fn=lambda out, _: out.sum(), scale_grads=False
    )
    batch = torch.zeros(SHAPE[0] * microbatches, *SHAPE[1:])

    def run() -> None:
        inputs = (batch,) if rank == 0 else ()
        schedule.step(*inputs, **({"target": batch} if rank == STAGES - 1 else {}))

    return run


def time_schedules() -> Iterator[dict[tuple[int, str, str], float]]:
    """Run every schedule of both implementations once per round.

    Yields:
        seconds of this rank after a barrier, by (microbatches, schedule, implementation).
    """
    config = ParallelConfig(pipeline_model_parallel_size=STAGES, distributed_timeout_minutes=2)
    with init_mesh(config, torch.device("cpu")) as mesh:
        runs = {
            (microbatches, name, make.__name__): make(name, microbatches, mesh)
            for microbatches in MICROBATCHES
            for name in CHUNKS
            for make in (ours, torch_pipelining)
        }
        while True:
            seconds = {}
            for key, run in runs.items():
                dist.barrier()
                begin = time.perf_counter()
                run()
                seconds[key] = time.perf_counter() - begin
            yield seconds


def compare_schedules(rounds: int) -> dict[str, object]:
    """Compare bubbles with theory, times with torch's, and the schedules with each other."""
    with Workers(time_schedules, STAGES) as workers:
        workers.next()  # the first use connects the ranks
        measured = [workers.next() for _ in range(rounds)]
    # The slowest rank determines the time of a schedule.
    median = {
        key: statistics.median(max(rank[key] for rank in ranks) for ranks in measured)
        for key in measured[0][0]
    }
    results = {f"{m} microbatches": _summary(m, median) for m in MICROBATCHES}
    return {"stages": STAGES, "forward": FORWARD, "backward": BACKWARD} | results


def _summary(microbatches: int, median: dict[tuple[int, str, str], float]) -> dict[str, object]:
    work = microbatches * (FORWARD + BACKWARD)
    rows: dict[str, object] = {}
    for name, chunks in CHUNKS.items():
        theory = bubble_fraction(STAGES, chunks, microbatches)
        our_time, torch_time = (median[microbatches, name, key] for key in ("ours", "torch_pipelining"))
        rows[name] = {
            "bubble by theory": round(theory, 4),
            "bubble": round(our_time / work - 1, 4),
            "time / theory": round(our_time / (work * (1 + theory)), 4),
            "time / torch's": round(our_time / torch_time, 4),
        }
        print(f"m = {microbatches} {name}: {rows[name]}", flush=True)
    gain = median[microbatches, "1f1b", "ours"] / median[microbatches, "interleaved", "ours"]
    print(f"m = {microbatches}: interleaved is {gain:.3f} times as fast as 1f1b", flush=True)
    return {**rows, "speed of interleaved / 1f1b": round(gain, 4)}
