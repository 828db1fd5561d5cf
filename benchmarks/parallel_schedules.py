"""Compare pipeline schedules with those of torch.distributed.pipelining, with simulated stages over gloo.

Stages sleep instead of computing, so four processes do not need four cores. Forward, the gradient of a stage's input
and those of its weights take equal times. `compare_stages` compares even stages of a model with those of
--pipeline-model-parallel-layout auto; its passes take times in proportion to their counted operations.
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
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

import megatron.plugins  # noqa: F401 (registers the divisions of layers)
from megatron.arguments import parse_run_config
from megatron.parallel.config import ParallelConfig
from megatron.parallel.mesh import Mesh, init_mesh
from megatron.parallel.pipeline import PipelineStage as OurStage
from megatron.parallel.pipeline import WgradQueue, run_schedule
from megatron.parallel.schedules import (
    BackwardInput,
    BackwardWeight,
    Forward,
    one_and_two,
    one_forward_one_backward,
    part_of,
    simulate,
    with_transfers,
)
from megatron.parallel.transfers import Transfers
from megatron.planner.schedule_costs import makespan
from megatron.variants.auto_schedule import counted_times
from megatron.variants.auto_stages import with_auto_layout
from megatron.variants.schedules import gpipe, interleaved
from megatron.variants.zero_bubble import Duration, zb_h1, zb_v

STAGES = 4
PASS = 0.06  # seconds per stage and microbatch of each of the three
SHAPE = (64, 1, 64)  # of the activations between stages; small, because transfer time is not measured
SCHEDULES = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
    "zb-v": zb_v,
}
CHUNKS = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb-v": 2}
TORCH_SCHEDULES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zb-h1": ScheduleInterleavedZeroBubble,
    "zb-v": ScheduleZBVZeroBubble,
}
MICROBATCHES = (2 * STAGES, 4 * STAGES)


class _Sleep(torch.autograd.Function):
    """Sleeps in forward, in backward, or in both."""

    @staticmethod
    def forward(ctx, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.seconds = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.seconds)
        return grad.clone(), None, None


class SleepingStage(nn.Module):
    """One of `chunks` model chunks of a rank. The gradient of its weight takes as long as that of its input."""

    def __init__(self, chunks: int) -> None:
        super().__init__()
        self.seconds = PASS / chunks
        self.weight = nn.Parameter(torch.zeros(SHAPE[-1]))

    def forward(self, x: Tensor) -> Tensor:
        return _Sleep.apply(x, self.seconds, self.seconds) + _Sleep.apply(self.weight, 0.0, self.seconds)


# Seconds of forward, of the gradient of an input and of the gradients of weights.
Seconds = tuple[float, float, float]


class _SleepAndDefer(torch.autograd.Function):
    """`_Sleep` of an input, whose backward also calls `weights`."""

    @staticmethod
    def forward(ctx, x: Tensor, seconds: Seconds, weights: Callable[[float], None]) -> Tensor:
        ctx.seconds, ctx.weights = seconds, weights
        time.sleep(seconds[0])
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.seconds[1])
        ctx.weights(ctx.seconds[2])
        return grad.clone(), None, None


class Stage(OurStage):
    """The sleeping model chunks of a rank, of which `last` is the model's last, if any."""

    def __init__(self, seconds: Seconds, last: int | None) -> None:
        wgrads = WgradQueue()
        super().__init__(torch.float32, wgrads)
        self.seconds, self.last = seconds, last
        self.x = torch.zeros(SHAPE, requires_grad=True)
        self.weights = wgrads.deferring(time.sleep)

    def recv_shape(self, microbatch: int) -> tuple[int, ...]:
        return SHAPE

    def compute(self, chunk: int, microbatch: int, x: Tensor | None) -> Tensor:
        out = _SleepAndDefer.apply(self.x if x is None else x, self.seconds, self.weights)
        return out.sum() if chunk == self.last else out


def parts_of(name: str, rank: int) -> list[int]:
    """Parts of the model on a rank."""
    return [part_of(rank, chunk, STAGES, name == "zb-v") for chunk in range(CHUNKS[name])]


def ours(name: str, microbatches: int, mesh: Mesh) -> Callable[[], None]:
    """Return a function that runs the schedule once."""
    chunks, parts = CHUNKS[name], parts_of(name, mesh.pp.rank)
    lists = SCHEDULES[name](STAGES, chunks, microbatches)
    actions = with_transfers(lists, STAGES, name == "zb-v")[mesh.pp.rank]
    last = chunks - 1 if parts[-1] == STAGES * chunks - 1 else None
    seconds = PASS / chunks
    stage, transfers = Stage((seconds, seconds, seconds), last), Transfers(mesh, scatter_gather=False)

    def run() -> None:
        run_schedule(stage, actions, transfers)
        transfers.finish()

    return run


def torch_pipelining(name: str, microbatches: int, mesh: Mesh) -> Callable[[], None]:
    """Return a function that runs the schedule of torch.distributed.pipelining once."""
    chunks, parts = CHUNKS[name], parts_of(name, mesh.pp.rank)
    stages = [PipelineStage(SleepingStage(chunks), part, chunks * STAGES, mesh.device) for part in parts]
    schedule = TORCH_SCHEDULES[name](
        stages[0] if name in ("gpipe", "1f1b") else stages,
        microbatches,
        loss_fn=lambda out, _: out.sum(),
        scale_grads=False,
    )
    batch = torch.zeros(SHAPE[0] * microbatches, *SHAPE[1:])

    def run() -> None:
        inputs = (batch,) if 0 in parts else ()
        schedule.step(*inputs, **({"target": batch} if STAGES * chunks - 1 in parts else {}))

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
    return {"stages": STAGES, "forward": PASS, "backward": 2 * PASS} | results


def _summary(microbatches: int, median: dict[tuple[int, str, str], float]) -> dict[str, object]:
    work = 3 * microbatches * PASS
    rows: dict[str, object] = {}
    for name, chunks in CHUNKS.items():
        lists = SCHEDULES[name](STAGES, chunks, microbatches)
        passes = makespan(simulate(lists, STAGES, one_and_two, v_shaped=name == "zb-v")) / chunks
        theory = PASS * passes / work - 1
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


# Llama 3.2 1B with sequences of 8,192 tokens: its output layer takes as long as two layers.
LLAMA_1B = (
    "--num-layers 16 --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --swiglu --disable-bias-linear --seq-length 8192 --position-embedding-type rope "
    f"--micro-batch-size 1 --global-batch-size 16 --train-samples 16 --lr 1e-3 --vocab-size 128256 "
    f"--pipeline-model-parallel-size {STAGES}"
)
DIVISIONS = {"even": "", "auto": "--pipeline-model-parallel-layout auto"}


def stage_times(division: str) -> tuple[str, Duration]:
    """The layers of the stages of `LLAMA_1B`, and seconds of its passes; those of a layer are `PASS` in forward."""
    flags = f"{LLAMA_1B} {DIVISIONS[division]}".split()
    config = with_auto_layout(parse_run_config(flags, description="", defaults={}))
    alone = parse_run_config(
        f"{LLAMA_1B} --pipeline-model-parallel-size 16".split(), description="", defaults={}
    )
    layer = counted_times(alone, 128_256)(1, Forward(0, 0))
    counted = counted_times(config, 128_256)
    layout = config.parallel.pipeline_model_parallel_layout
    return layout or "4 layers each", lambda rank, action: PASS / layer * counted(rank, action)


def time_stages() -> Iterator[dict[str, float]]:
    """Run 1F1B with 16 microbatches over both divisions once per round. Yields seconds of this rank by division."""
    config = ParallelConfig(pipeline_model_parallel_size=STAGES, distributed_timeout_minutes=2)
    with init_mesh(config, torch.device("cpu")) as mesh:
        rank, transfers = mesh.pp.rank, Transfers(mesh, scatter_gather=False)
        actions = with_transfers(one_forward_one_backward(STAGES, 1, 16), STAGES)[rank]
        stages = {}
        for division in DIVISIONS:
            _, duration = stage_times(division)
            forward, of_input, of_weights = (
                duration(rank, kind(0, 0)) for kind in (Forward, BackwardInput, BackwardWeight)
            )
            stages[division] = Stage((forward, of_input, of_weights), 0 if rank == STAGES - 1 else None)
        while True:
            seconds = {}
            for division, stage in stages.items():
                dist.barrier()
                begin = time.perf_counter()
                run_schedule(stage, actions, transfers)
                transfers.finish()
                seconds[division] = time.perf_counter() - begin
            yield seconds


def compare_stages(rounds: int) -> dict[str, object]:
    """Compare even stages with automatic ones, for a model with a large vocabulary."""
    with Workers(time_stages, STAGES) as workers:
        workers.next()  # the first use connects the ranks
        measured = [workers.next() for _ in range(rounds)]
    rows: dict[str, object] = {}
    times = {}
    for division in DIVISIONS:
        layout, duration = stage_times(division)
        times[division] = statistics.median(max(rank[division] for rank in ranks) for ranks in measured)
        theory = makespan(simulate(one_forward_one_backward(STAGES, 1, 16), STAGES, duration))
        rows[division] = {
            "stages": layout,
            "seconds": round(times[division], 4),
            "time / theory": round(times[division] / theory, 4),
        }
    rows["time of auto / even"] = round(times["auto"] / times["even"], 4)
    print(rows, flush=True)
    return rows
