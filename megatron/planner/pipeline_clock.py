"""The duration of a pipeline schedule, for the search: `megatron.parallel.schedules.simulate` in fewer, larger steps.

The passes that start together when every pass takes the same time depend on none of each other, so the clock advances
them at once, over all stages. Which these are depends on the schedule alone and is kept.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from megatron.parallel.schedules import BackwardWeight, Forward, Schedule, part_of, simulate


@dataclasses.dataclass(frozen=True)
class Wave:
    """Passes that the clock advances at once, one of a stage each. Arrays have one element for each pass.

    Attributes:
        ranks: its stage.
        durations: index of its duration in an array [forward or backward, stage, chunk].
        needed: index of the result that it waits for.
        result: index of its result.
        moved: 1 if its result goes to another stage, else 0.
    """

    ranks: np.ndarray
    durations: np.ndarray
    needed: np.ndarray
    result: np.ndarray
    moved: np.ndarray


@functools.lru_cache(maxsize=512)
def waves(schedule: Schedule, stages: int, chunks: int, microbatches: int) -> tuple[Wave, ...]:
    """The passes of a schedule whose backward passes are whole, in an order in which all that they need is done.

    Result number (direction, part, microbatch) is that of a pass. Before the first part and after the last one are
    results that are there from the start.
    """
    timeline = simulate(schedule(stages, chunks, microbatches), stages, lambda rank, action: 1.0)
    by_start: dict[float, list[tuple[int, int, int, int, int]]] = {}
    parts = stages * chunks
    for rank, row in enumerate(timeline):
        for action, start, _ in row:
            assert not isinstance(action, BackwardWeight)
            forward = isinstance(action, Forward)
            part = part_of(rank, action.chunk, stages)
            after = part + (1 if forward else -1)
            direction = 0 if forward else 1
            results = (direction * (parts + 2) + 1) * microbatches + action.microbatch
            needed = results + (part - (1 if forward else -1)) * microbatches
            moved = 0 <= after < parts and after % stages != rank
            duration = (direction * stages + rank) * chunks + action.chunk
            line = rank, duration, needed, results + part * microbatches, int(moved)
            by_start.setdefault(start, []).append(line)
    return tuple(Wave(*np.array(by_start[start]).T) for start in sorted(by_start))


def pipeline_makespan(
    schedule: Schedule, shape: tuple[int, int, int], durations: np.ndarray, transfer: float
) -> float:
    """Seconds from the first start to the last end of a schedule.

    Args:
        shape: stages, chunks per stage and microbatches.
        durations: seconds [2, stages, chunks] of a forward and of a backward pass.
        transfer: seconds from the end of a pass to the arrival of its result at another stage.
    """
    stages, chunks, microbatches = shape
    seconds = durations.reshape(-1)
    free, arrivals = np.zeros(stages), np.zeros(2 * (stages * chunks + 2) * microbatches)
    for wave in waves(schedule, stages, chunks, microbatches):
        start = np.maximum(free[wave.ranks], arrivals[wave.needed])
        end = start + seconds[wave.durations]
        free[wave.ranks] = end
        arrivals[wave.result] = end + transfer * wave.moved
    return float(free.max())
