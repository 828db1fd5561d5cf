"""Activations that a pipeline schedule holds, counted from its lists of passes."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

from megatron.parallel.schedules import BackwardInput, BackwardWeight, Compute, Forward, Schedule

# A pass: its kind and chunk.
Pass = tuple[type[Compute], int]
# Numbers of microbatches held by each chunk from forward to backward, then from there to its weight gradients, without
# that of a pass that runs.
Held = tuple[int, ...]
# Groups of microbatches (one per stage) after which no further one raises what a stage holds, by schedule, and for
# those that are not named. ZB-H1's and ZB-H2's stages repeat their passes after one and two.
GROUPS, MORE_GROUPS = {"zb-h1": 2, "zb-h2": 3}, 4
# Schedules that hold all microbatches of a step.
UNLIMITED = ("gpipe", "breadth-first")


def counted_microbatches(name: str, stages: int, microbatches: int) -> int:
    """Number of microbatches whose passes hold as much as those of a whole step.

    The automatic schedule depends on their number, and some schedules hold all of them.
    """
    if name in (*UNLIMITED, "auto"):
        return microbatches
    return min(microbatches, GROUPS.get(name, MORE_GROUPS) * stages)


@functools.lru_cache(maxsize=4096)
def most_held(
    schedule: Schedule, stages: int, chunks: int, microbatches: int, stage: int
) -> tuple[tuple[Pass, Held], ...]:
    """The most that a stage holds while it runs a pass: in no other pass of a kind it has as many of everything."""
    moments: dict[Pass, set[Held]] = {}
    for pass_, held in _moments(_passes(schedule, stages, chunks, microbatches)[stage], chunks):
        moments.setdefault(pass_, set()).add(held)
    return tuple((pass_, held) for pass_, all_held in moments.items() for held in _largest(all_held))


@functools.lru_cache(maxsize=1024)
def most_held_after_forward(
    schedule: Schedule, stages: int, chunks: int, microbatches: int, stage: int
) -> tuple[tuple[Pass, int | None, Held], ...]:
    """The same apart for each chunk whose forward is the last that ran before the pass; None before the first."""
    moments: dict[tuple[Pass, int | None], set[Held]] = {}
    before = None
    for pass_, held in _moments(_passes(schedule, stages, chunks, microbatches)[stage], chunks):
        moments.setdefault((pass_, before), set()).add(held)
        if pass_[0] is Forward:
            before = pass_[1]
    return tuple((*key, held) for key, all_held in moments.items() for held in _largest(all_held))


@functools.lru_cache(maxsize=16)
def _passes(schedule: Schedule, stages: int, chunks: int, microbatches: int) -> Sequence[Sequence[Compute]]:
    """The passes of all stages, which `most_held` asks for one stage after the other."""
    return schedule(stages, chunks, microbatches)


def _moments(actions: Sequence[Compute], chunks: int) -> Iterator[tuple[Pass, Held]]:
    """Yield what a stage holds beside each pass."""
    held = [0] * (2 * chunks)
    for action in actions:
        chunk, forward, waits = action.chunk, isinstance(action, Forward), isinstance(action, BackwardWeight)
        if not forward:
            held[chunk + (chunks if waits else 0)] -= 1
        yield (type(action), chunk), tuple(held)
        if forward or isinstance(action, BackwardInput):
            held[chunk + (0 if forward else chunks)] += 1


def _largest(moments: set[Held]) -> tuple[Held, ...]:
    """Moments that no other one equals or exceeds in every number."""
    kept: list[Held] = []
    for moment in sorted(moments, key=sum, reverse=True):
        if not any(all(a <= b for a, b in zip(moment, other, strict=True)) for other in kept):
            kept.append(moment)
    return tuple(kept)
