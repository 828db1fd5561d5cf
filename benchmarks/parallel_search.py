"""Time of the lists of --pipeline-schedule auto in the simulator, for random times of passes.

Compared with the best schedule with a name that fits the same memory, and with 1F1B.
"""

from __future__ import annotations

import dataclasses
import random
import statistics

import megatron.plugins  # noqa: F401 (registers the schedules)
from megatron.parallel.schedules import (
    SCHEDULES,
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
)
from megatron.variants.auto_schedule import best_schedule, makespan, peak_chunks
from megatron.variants.zero_bubble import Duration

CASES = 500
# Schedules with a name, by the number of chunks on a rank. The interleaved ones have other chunks.
NAMED = {
    1: ("1f1b", "gpipe", "zb-h1", "zb-h2"),
    2: ("zb-v", "v-half", "v-min", "dualpipe-v"),
}
# Cases with each spread of times, on 8 stages with 16 microbatches.
SPREADS = {0.0: 1, 0.2: 150, 0.5: 50}


def uneven_times(rng: random.Random, stages: int, chunks: int, spread: float = 0.5) -> Duration:
    """Return random times of the passes of each part; a whole backward pass takes the sum of its parts."""
    times = {
        (rank, chunk, kind): rng.uniform(1 - spread, 1 + spread)
        for rank in range(stages)
        for chunk in range(chunks)
        for kind in (Forward, BackwardInput, BackwardWeight)
    }

    def duration(rank: int, action: Compute) -> float:
        kinds = (BackwardInput, BackwardWeight) if isinstance(action, Backward) else (type(action),)
        return sum(times[rank, action.chunk, kind] for kind in kinds)

    return duration


@dataclasses.dataclass(frozen=True)
class Case:
    """A pipeline of 2 to 6 stages, and times of its passes.

    Attributes:
        limit: chunks whose activations a stage may hold.
        transfer: seconds from one stage to the next.
    """

    stages: int
    chunks: int
    microbatches: int
    limit: int
    duration: Duration
    transfer: float

    @classmethod
    def random(cls, seed: int) -> Case:
        rng = random.Random(seed)
        stages, chunks = rng.randint(2, 6), rng.randint(1, 2)
        microbatches, in_flight = rng.randint(1, 4 * stages), rng.randint(1, 2 * stages)
        duration, transfer = uneven_times(rng, stages, chunks), rng.choice((0.0, 0.1))
        return cls(stages, chunks, microbatches, chunks * in_flight, duration, transfer)

    def best(self) -> list[list[Compute]]:
        """Return the automatic list."""
        return best_schedule(
            self.stages,
            self.chunks,
            self.microbatches,
            duration=self.duration,
            in_flight=self.limit // self.chunks,
            transfer_time=self.transfer,
        )

    def seconds(self, schedule: list[list[Compute]]) -> float:
        """Return the time of a list in the simulator."""
        v_shaped = self.chunks == 2
        return makespan(schedule, self.stages, self.duration, transfer_time=self.transfer, v_shaped=v_shaped)

    def named_seconds(self) -> dict[str, float]:
        """Return the time of each schedule with a name that fits the memory."""
        seconds = {}
        for name in NAMED[self.chunks]:
            if name != "dualpipe-v" or self.microbatches >= 2 * self.stages:
                schedule = SCHEDULES[name](self.stages, self.chunks, self.microbatches)
                if max(map(peak_chunks, schedule)) <= self.limit:
                    seconds[name] = self.seconds(schedule)
        return seconds


def least_time(stages: int, microbatches: int, in_flight: int, duration: Duration) -> float:
    """Return a lower bound of the time of every list with one chunk per stage.

    A stage begins when its first input has passed the stages before. Until the first gradient comes back it runs no
    more forwards than it may hold. After its last gradient those of the stages before follow, each with its weights.
    """
    f, b, w = (
        [duration(rank, kind(0, 0)) for rank in range(stages)]
        for kind in (Forward, BackwardInput, BackwardWeight)
    )
    bounds = []
    for rank in range(stages):
        idle = sum(f[rank:]) + sum(b[rank + 1 :]) - min(in_flight, microbatches) * f[rank]
        begin = sum(f[:rank]) + max(0.0, idle)
        bounds.append(begin + microbatches * (f[rank] + b[rank] + w[rank]))
        bounds += [
            begin + microbatches * (f[rank] + b[rank]) + sum(b[before:rank]) + w[before]
            for before in range(rank)
        ]
    return max(bounds)


def compared_with_1f1b(seed: int, spread: float) -> tuple[float, float]:
    """Return the time over 1F1B's, in its memory, of the automatic list and of `least_time`.

    The pipeline has 8 stages and 16 microbatches.
    """
    duration = uneven_times(random.Random(seed), 8, 1, spread)
    best, usual = (
        makespan(schedule, 8, duration, v_shaped=False)
        for schedule in (best_schedule(8, 1, 16, duration=duration), SCHEDULES["1f1b"](8, 1, 16))
    )
    return best / usual, least_time(8, 16, 8, duration) / usual


def compare_search() -> dict[str, object]:
    """Compare the automatic schedule with those that have a name, in the simulator."""
    over_best = []
    for case in map(Case.random, range(CASES)):
        if named := case.named_seconds():
            over_best.append(case.seconds(case.best()) / min(named.values()))
    rows: dict[str, object] = {
        "cases": CASES,
        "cases where a schedule with a name fits the memory": len(over_best),
        "time / best with a name": {
            "mean": round(statistics.mean(over_best), 4),
            "worst": round(max(over_best), 4),
        },
    }
    print(rows, flush=True)
    for spread, cases in SPREADS.items():
        ratios, bounds = zip(*(compared_with_1f1b(seed, spread) for seed in range(cases)), strict=True)
        above = max(ratio / bound for ratio, bound in zip(ratios, bounds, strict=True))
        row = {
            "cases": cases,
            "time / 1f1b": {"mean": round(statistics.mean(ratios), 4), "worst": round(max(ratios), 4)},
            "bound / 1f1b": {"mean": round(statistics.mean(bounds), 4), "worst": round(max(bounds), 4)},
            "worst time / bound": round(above, 4),
        }
        print(f"times that differ by up to {spread:.0%}: {row}", flush=True)
        rows[f"8 stages, 16 microbatches, times that differ by up to {spread:.0%}"] = row
    return rows
