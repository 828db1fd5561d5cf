"""Timers of the phases of an iteration.

On a GPU a phase is timed by two events in the stream. The host never waits for that, and a phase that waits for data or
another rank is as long as the device was idle. On a CPU it is timed by the clock.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from megatron.parallel.collectives import all_gather
from megatron.parallel.mesh import Axis
from megatron.parallel.phases import NOTHING
from megatron.reports.config import ReportConfig, TimingConfig
from megatron.reports.reports import Reports
from megatron.training.loop import Hook, Trainer
from megatron.training.report import Interval

# Phases of an iteration by the --timing-log-level that times them: 1 for once per iteration, 2 for each microbatch.
# Some contain others.
ITERATION = {
    "batch-generator": 1,
    "forward-backward": 1,
    "forward-recv": 2,
    "forward-compute": 2,
    "forward-send": 2,
    "backward-recv": 2,
    "backward-compute": 2,
    "backward-send": 2,
    "grads-reduce": 1,
    "optimizer": 1,
    "params-gather": 1,
}
# Phases between iterations.
BETWEEN = {"save-checkpoint": 1, "evaluate": 1, "sample": 1}
LEVELS = ITERATION | BETWEEN


class PhaseTimes(Hook):
    """Times the phases of --timing-log-level and logs them."""

    def __init__(self, reports: Reports) -> None:
        """`reports` gets the newest times."""
        self.reports = reports

    @contextmanager
    def during_run(self, trainer: Trainer) -> Iterator[None]:
        self.timers = Timers(trainer.config.plugin(TimingConfig).timing_log_level, trainer.mesh.device)
        if self.timers.level == 0:
            yield
            return

        @contextmanager
        def timed(phase: str) -> Iterator[None]:
            with self.timers(phase):
                yield
            if phase in BETWEEN:
                self._log(trainer, self.timers.take(BETWEEN, trainer.mesh.world))

        trainer.engine.phases.observers.append(timed)
        yield

    def before_report(self, trainer: Trainer, interval: Interval) -> None:
        self.times = self.timers.take(ITERATION, trainer.mesh.world, interval.iterations)
        if trainer.config.plugin(ReportConfig).log_timers_to_tensorboard:
            # NVIDIA's name of the longest time over the ranks.
            interval.values |= {f"{phase}-time": max(row.values()) for phase, row in self.times.items()}

    def after_report(self, trainer: Trainer, interval: Interval) -> None:
        self._log(trainer, self.times)
        if self.times:
            self.reports.by_rank["phases, seconds per iteration"] = self.times

    def _log(self, trainer: Trainer, times: dict[str, dict[int, float]]) -> None:
        if times:
            trainer.log(times_text(times, trainer.config.plugin(TimingConfig).timing_log_option))


class Timers:
    """`with timers("optimizer"):` times the phase if its level is at most `level`."""

    def __init__(self, level: int, device: torch.device) -> None:
        self.level = level
        self.on_gpu = device.type == "cuda"
        # Begin and end of each phase, each time.
        self.spans: dict[str, list[tuple[Any, Any]]] = collections.defaultdict(list)

    def __call__(self, phase: str) -> AbstractContextManager[None]:
        return self._span(phase) if LEVELS[phase] <= self.level else NOTHING

    @contextmanager
    def _span(self, phase: str) -> Iterator[None]:
        begin = self._mark()
        yield
        self.spans[phase].append((begin, self._mark()))

    def _mark(self) -> torch.cuda.Event | float:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def take(self, phases: Iterable[str], world: Axis, iterations: int = 1) -> dict[str, dict[int, float]]:
        """Seconds per iteration of each phase since the last call, by the ranks that were in it; nothing at level 0.

        Synchronizes the host with the device. Every process must take part.
        """
        if self.level == 0:
            return {}
        names = list(phases)
        sums = torch.tensor([[self._sum(name) / iterations for name in names]], dtype=torch.float64)
        by_rank = all_gather(sums, world).tolist()
        times = {name: {r: row[i] for r, row in enumerate(by_rank) if row[i]} for i, name in enumerate(names)}
        return {name: seconds for name, seconds in times.items() if seconds}

    def _sum(self, phase: str) -> float:
        spans = self.spans.pop(phase, [])
        if not self.on_gpu:
            return sum(end - begin for begin, end in spans)
        if spans:
            spans[-1][1].synchronize()
        return sum(begin.elapsed_time(end) for begin, end in spans) / 1000


def times_text(times: dict[str, dict[int, float]], option: str) -> str:
    """Format the result of `Timers.take` as Megatron-LM does: "max", "minmax" or "all" of the ranks' times."""
    if option == "all":
        lines = ["times across ranks (ms):"]
        for phase, by_rank in times.items():
            lines.append(f"  {phase}:")
            lines += [f"     rank {rank:2d}: {1000 * seconds:.2f}" for rank, seconds in by_rank.items()]
        return "\n".join(lines)
    lines = ["max time across ranks (ms):" if option == "max" else "(min, max) time across ranks (ms):"]
    for phase, by_rank in times.items():
        low, high = (f"{1000 * end(by_rank.values()):.2f}" for end in (min, max))
        lines.append(
            f"    {f'{phase} '.ljust(48, '.')}: " + (high if option == "max" else f"({low}, {high})")
        )
    return "\n".join(lines)
