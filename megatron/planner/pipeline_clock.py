"""The duration of a pipeline schedule, for the search: `megatron.parallel.schedules.simulate` in fewer, larger steps.

The passes that start together when every pass takes the same time depend on none of each other, so the clock advances
them at once, over all stages. Which these are depends on the schedule alone and is kept.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import numpy as np

from megatron.parallel.schedules import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    Schedule,
    Validate,
    part_of,
    simulate,
    with_transfers,
)
from megatron.performance.validation_lists import with_validation

# Kinds of passes, in the order of their durations.
KINDS: tuple[type[Compute], ...] = (Forward, Backward, BackwardInput, BackwardWeight)


@dataclasses.dataclass(frozen=True)
class Wave:
    """Passes that the clock advances at once, one of a stage each. Arrays have one element for each pass.

    Attributes:
        ranks: its stage.
        durations: index of its duration in an array [kind of pass, stage, chunk].
        needed: index of the result that it waits for.
        result: index of its result.
        moved: 1 if its result goes to another stage, else 0.
        index: its place among the passes of its stage.
    """

    ranks: np.ndarray
    durations: np.ndarray
    needed: np.ndarray
    result: np.ndarray
    moved: np.ndarray
    index: np.ndarray


@functools.lru_cache(maxsize=512)
def waves(
    schedule: Schedule, stages: int, chunks: int, microbatches: int, v_shaped: bool
) -> tuple[Wave, ...]:
    """The passes of a schedule, in an order in which all that they need is done.

    Result number (direction, part, microbatch) is that of a pass. Before the first part and after the last one are
    results that are there from the start. The last number is that of weight gradients, for which nothing waits.
    """
    lists = schedule(stages, chunks, microbatches)
    timeline = simulate(lists, stages, lambda rank, action: 1.0, v_shaped=v_shaped)
    by_start: dict[float, list[tuple[int, int, int, int, int, int]]] = {}
    parts = stages * chunks
    for rank, row in enumerate(timeline):
        for index, (action, start, _) in enumerate(row):
            duration = (KINDS.index(type(action)) * stages + rank) * chunks + action.chunk
            if isinstance(action, BackwardWeight):
                line = (
                    rank,
                    duration,
                    action.microbatch,
                    num_results(stages, chunks, microbatches) - 1,
                    0,
                    index,
                )
            else:
                forward = isinstance(action, Forward)
                part, step = part_of(rank, action.chunk, stages, v_shaped), 1 if forward else -1
                results = ((0 if forward else parts + 2) + 1) * microbatches + action.microbatch
                needed = results + (part - step) * microbatches
                moved = 0 <= part + step < parts and _rank_of(part + step, stages, v_shaped) != rank
                line = rank, duration, needed, results + part * microbatches, int(moved), index
            by_start.setdefault(start, []).append(line)
    return tuple(Wave(*np.array(by_start[start]).T) for start in sorted(by_start))


def num_results(stages: int, chunks: int, microbatches: int) -> int:
    """Number of results in `waves`."""
    return 2 * (stages * chunks + 2) * microbatches + 1


def _rank_of(part: int, stages: int, v_shaped: bool) -> int:
    chunk, place = divmod(part, stages)
    return stages - 1 - place if v_shaped and chunk % 2 else place


@dataclasses.dataclass(frozen=True)
class Earlier:
    """State of the step before, whose update a step validates.

    Attributes:
        begins: seconds [stages] at which each stage may begin.
        passes: number [stages] of the passes before the validation.
        norm: seconds at which the gradients' norm is known, for which the other passes wait.
    """

    begins: np.ndarray
    passes: np.ndarray
    norm: float


def pipeline_ends(
    schedule: Schedule,
    shape: tuple[int, int, int],
    durations: np.ndarray,
    transfer: float,
    *,
    v_shaped: bool = False,
    earlier: Earlier | None = None,
) -> np.ndarray:
    """Seconds [stages] at which the last pass of each stage ends.

    Args:
        shape: stages, chunks per stage and microbatches.
        durations: seconds [4, stages, chunks] of each of `KINDS`.
        transfer: seconds from the end of a pass to the arrival of its result at another stage.
    """
    stages, chunks, microbatches = shape
    seconds = durations.reshape(-1)
    free = np.zeros(stages) if earlier is None else earlier.begins.copy()
    arrivals = np.zeros(num_results(stages, chunks, microbatches))
    for wave in waves(schedule, stages, chunks, microbatches, v_shaped):
        start = np.maximum(free[wave.ranks], arrivals[wave.needed])
        if earlier is not None:
            waits = wave.index >= earlier.passes[wave.ranks]
            start = np.where(waits, np.maximum(start, earlier.norm), start)
        end = start + seconds[wave.durations]
        free[wave.ranks] = end
        arrivals[wave.result] = end + transfer * wave.moved
    return free


@functools.lru_cache(maxsize=512)
def passes_before_validation(
    schedule: Schedule, stages: int, chunks: int, microbatches: int, v_shaped: bool
) -> tuple[int, ...]:
    """Number of the passes of each stage before it validates the update of the step before."""
    lists = with_transfers(schedule(stages, chunks, microbatches), stages, v_shaped)
    early = (itertools.takewhile(lambda action: action != Validate(), row) for row in with_validation(lists))
    return tuple(sum(isinstance(action, Compute) for action in row) for row in early)
