"""Count the resources of a rank's iteration, on a real or a fake engine."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

from megatron.data.batch import Batch
from megatron.parallel.phases import Phases
from megatron.planner.counting import Counter, Traffic
from megatron.planner.dry_run_report import RankCost
from megatron.reports.config import ReportConfig
from megatron.training.engine import Engine


class PhaseRecorder(Phases):
    """Phases of an engine in a dry run: record the counts before and after the passes, and advance `bar`."""

    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self.counter = counter
        self.bar: tqdm | None = None

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        counter = self.counter
        if phase == "forward-backward":
            counter.peak = self.live = counter.live
            self.before = dict(counter.traffic), counter.flops
        yield
        if phase == "forward-backward":
            self.peak = counter.peak
            self.after = dict(counter.traffic), counter.flops
        if phase.endswith("-compute") and self.bar is not None:
            self.bar.update()


def count_step(
    engine: Engine, phases: PhaseRecorder, batches: Iterator[Batch], *, simulated: int, microbatches: int
) -> RankCost:
    """Count the resources of an iteration of `microbatches`, of which the first `simulated` are executed.

    Call it within the `with` block of the counter of `phases`, in which the engine was built with these phases.
    """
    counter = phases.counter
    counter.traffic.clear()
    counter.flops = 0
    mesh, config = engine.mesh, engine.config
    batch_bytes: list[int] = []
    with tqdm(
        total=2 * simulated * len(engine.chunks),
        desc=f"rank {mesh.world.rank}",
        unit="pass",
        leave=False,
        disable=not (config.plugin(ReportConfig).progress and sys.stderr.isatty()),
    ) as bar:
        phases.bar = bar
        engine.train_step(
            _recording_sizes(batches, batch_bytes),
            num_microbatches=simulated,
            consumed_samples=0,
            lr=config.optimizer.lr,
            weight_decay=config.optimizer.weight_decay,
        )
    # Gradients are reduced once per step unless they are sharded; on other axes every pass communicates.
    sharded = any(engine.buffer.grad_memory.sharded)
    groups = [] if sharded else [bucket.group for bucket in engine.buffer.buckets]
    axes_of = ((group.reduce_axis, group.shard_axis, group.instance_axis) for group in groups)
    reduce_axes = {axis.name for axes in axes_of for axis in axes if axis.size > 1}
    repeat = functools.partial(_repeat, microbatches, simulated)
    (before, flops_before), (after, flops_after) = phases.before, phases.after
    traffic = dict(counter.traffic)
    for key in after:
        if key[1] not in reduce_axes:
            passes = after[key] - before.get(key, Traffic())
            if key[0] == "copy":  # what has not left yet when its backward begins need not come back
                more = (microbatches - simulated) / simulated
                traffic[key] += Traffic(round(more * passes.calls), round(more * passes.bytes))
            else:
                traffic[key] += Traffic(repeat(passes.calls), repeat(passes.bytes))
    other_batches = (microbatches - simulated) * max(batch_bytes) // mesh.cp.size
    state = state_bytes(engine)
    memory = state | {
        "buffers": phases.live - sum(state.values()) + other_batches,
        "activations": phases.peak - phases.live,
        "peak": counter.peak + other_batches,
    }
    if counter.host_peak:
        memory["in host memory"] = counter.host_peak
    axes = ("pp", "dp", *(("cp",) if mesh.cp.size > 1 else ()), "tp")
    return RankCost(
        rank=mesh.world.rank,
        coordinates={name: getattr(mesh, name).rank for name in axes},
        parameters=engine.buffer.local_elements,
        unique_parameters=sum(
            param.num_counted
            for bucket in engine.buffer.buckets
            if bucket.group.reduce_axis.rank == 0
            for param in bucket.flat_params
        ),
        memory=memory,
        traffic=traffic,
        flops=counter.flops + repeat(flops_after - flops_before),
    )


def _repeat(microbatches: int, simulated: int, count: int) -> int:
    """Return the count of the microbatches that are not executed, from that of the `simulated` ones."""
    assert count % simulated == 0, f"{simulated} microbatches do not all do the same: {count}"
    return count // simulated * (microbatches - simulated)


def _recording_sizes(batches: Iterator[Batch], batch_bytes: list[int]) -> Iterator[Batch]:
    for batch in batches:
        batch_bytes.append(sum(x.numel() * x.element_size() for _, x in batch.items()))
        yield batch


def state_bytes(engine: Engine) -> dict[str, int]:
    """Return the bytes of the state that a process keeps on its device between iterations."""
    buffer, optimizer = engine.buffer, engine.optimizer
    here = [not bucket.group.optimizer.on_host for bucket in buffer.buckets]
    masters = [] if buffer.is_fp32 else buffer.masters
    tensors = {
        "weights": [buffer.params],
        "gradients": [buffer.grads],
        "master weights": itertools.compress(masters, here),
        "moments": [
            piece for pieces in optimizer.state.values() for piece in itertools.compress(pieces, here)
        ],
    }
    return {name: sum(x.numel() * x.element_size() for x in group) for name, group in tensors.items()}
