"""Pipeline schedules as data: the order of forward and backward passes on each rank.

A schedule is a list of actions per pipeline rank, made by a pure function of (stages, chunks per rank, microbatches).
The executor (`pipeline.py`) runs the lists, `simulate` runs them against a clock, and `tools/draw_figures.py` draws the
result. This module does not use torch.

A rank's position in the pipeline is its stage. With more than one chunk per rank (virtual stages), the layers are split
into `stages * chunks` parts, and chunk c of rank p is part `c * stages + p`. In a V-shaped schedule the second of two
chunks is part `2 * stages - 1 - p`: the parts come back, and rank 0 has both ends of the model.

Sources: 1F1B (PipeDream-Flush) and model chunks, arXiv 2104.04473 section 2.2; split backward passes, 2401.10241
section 2; V shape, 2405.15362 section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Forward:
    """Run the layers of one chunk forward on one microbatch."""

    microbatch: int
    chunk: int


@dataclass(frozen=True)
class Backward:
    """Run the layers of one chunk backward on one microbatch."""

    microbatch: int
    chunk: int


@dataclass(frozen=True)
class BackwardInput:
    """Run a backward pass without the products for weight gradients, which wait for `BackwardWeight`."""

    microbatch: int
    chunk: int


@dataclass(frozen=True)
class BackwardWeight:
    """Run the products for weight gradients that a `BackwardInput` left."""

    microbatch: int
    chunk: int


@dataclass(frozen=True)
class Send:
    """Send the output of `chunk` to rank `peer` or, if `forward` is false, the gradient of its input."""

    microbatch: int
    chunk: int
    peer: int
    forward: bool


@dataclass(frozen=True)
class Receive:
    """Receive the input of `chunk` from rank `peer` or, if `forward` is false, the gradient of its output."""

    microbatch: int
    chunk: int
    peer: int
    forward: bool


@dataclass(frozen=True)
class Validate:
    """Validate the optimizer's last step (`performance/post_validation.py`)."""


Compute = Forward | Backward | BackwardInput | BackwardWeight
Action = Compute | Send | Receive | Validate


def forward_only(stages: int, chunks: int, microbatches: int) -> list[list[Compute]]:
    """Evaluation: forwards of microbatches in groups of `stages`, each group through one chunk after another.

    A group keeps every rank busy until its first microbatch returns to rank 0 for the next chunk.
    """
    return [
        [
            Forward(microbatch, chunk)
            for first in range(0, microbatches, stages)
            for chunk in range(chunks)
            for microbatch in range(first, min(first + stages, microbatches))
        ]
        for _ in range(stages)
    ]


def one_forward_one_backward(stages: int, chunks: int, microbatches: int) -> list[list[Compute]]:
    """1F1B: one warm-up forward for each later stage, then alternate one forward and one backward.

    Rank p holds the activations of at most `stages - p` microbatches; the bubble is the same as GPipe's.
    """
    assert chunks == 1
    forwards = [Forward(microbatch, 0) for microbatch in range(microbatches)]
    backwards = [Backward(microbatch, 0) for microbatch in range(microbatches)]
    return [alternate(forwards, backwards, warmup=stages - rank - 1) for rank in range(stages)]


# (stages, chunks per stage, microbatches) to the computations of each stage, in order.
Schedule = Callable[[int, int, int], list[list[Compute]]]
# By --pipeline-schedule; those with several chunks per stage, those that are V-shaped and those that split backward
# passes. `megatron.plugins` adds to them.
SCHEDULES: dict[str, Schedule] = {"1f1b": one_forward_one_backward}
CHUNKED: set[str] = set()
V_SHAPED: set[str] = set()
SPLIT: set[str] = set()


def alternate(forwards: Sequence[Compute], backwards: Sequence[Compute], warmup: int) -> list[Compute]:
    """`warmup` forwards, then one forward and one backward in turn, then the remaining backwards."""
    actions = list(forwards[:warmup])
    steady = forwards[warmup:]
    for forward, backward in zip(steady, backwards, strict=False):
        actions += (forward, backward)
    actions += backwards[len(steady) :]
    return actions


def one_and_two(_: int, action: Compute) -> float:
    """Duration of a pass if a backward takes twice as long as a forward, half of it for weight gradients."""
    return 2.0 if isinstance(action, Backward) else 1.0


# A simulated schedule: (action, start, end) of each rank, in order.
Timeline = list[list[tuple[Compute, float, float]]]


def simulate(
    schedule: Sequence[Sequence[Action]],
    stages: int,
    duration: Callable[[int, Compute], float] = one_and_two,
    transfer_time: float = 0.0,
    v_shaped: bool = False,
) -> Timeline:
    """Simulate a schedule: each pass starts as soon as its rank is free and its input has arrived.

    Args:
        schedule: actions of each rank. `Send` and `Receive` are ignored, since transfers overlap with computation.
        duration: gives the duration of a pass on a rank.
        transfer_time: time from the end of a pass to the arrival of its result on another rank.
    """
    todo = [[a for a in actions if isinstance(a, Compute)] for actions in schedule]
    chunks = 1 + max(action.chunk for actions in todo for action in actions)
    timeline: Timeline = [[] for _ in todo]
    arrival: dict[Input, float] = {}
    waiting: set[Input] = set()
    ready = list(range(stages))
    while ready:
        rank = ready.pop()
        row = timeline[rank]
        while len(row) < len(todo[rank]):
            action = todo[rank][len(row)]
            needed = (rank, isinstance(action, Forward), action.microbatch, action.chunk)
            arrived = None if isinstance(action, BackwardWeight) else arrival.get(needed)
            if arrived is None and _has_producer(action, rank, stages, chunks, v_shaped):
                waiting.add(needed)
                break
            start = max(arrived or 0.0, row[-1][2] if row else 0.0)
            end = start + duration(rank, action)
            row.append((action, start, end))
            result = _result(action, rank, stages, chunks, v_shaped)
            if result is not None:
                arrival[result] = end + (transfer_time if result[0] != rank else 0.0)
                if result in waiting:
                    waiting.remove(result)
                    ready.append(result[0])
    assert not waiting, f"the schedule deadlocks: {waiting} are never reached"
    return timeline


def with_transfers(
    schedule: Sequence[Sequence[Compute]], stages: int, v_shaped: bool = False
) -> list[list[Action]]:
    """Add the point-to-point transfers to a schedule, in an order that cannot deadlock.

    The simulator's clock puts all transfers and passes of all ranks in one order, and each rank's list is its part of
    that order. A transfer comes at the end of the pass that produces it, before the passes that start at that moment.
    So the first remaining action in the order can always run: even if a send blocks until its receive, no ranks wait in
    a cycle. For the same reason both ranks of a pair list their transfers, in either direction, in the same order.

    Consecutive chunks on the same rank (`stages` is 1, or the turn of a V) need no transfer.
    """
    chunks = 1 + max(action.chunk for actions in schedule for action in actions)
    # The keys (time, transfers first, rank) are distinct: a rank starts and ends one pass at a time.
    events: list[list[tuple[tuple[float, int, int], Action]]] = [[] for _ in schedule]
    for rank, row in enumerate(simulate(schedule, stages, v_shaped=v_shaped)):
        for action, start, end in row:
            events[rank].append(((start, 1, rank), action))
            result = _result(action, rank, stages, chunks, v_shaped)
            if result is None or result[0] == rank:
                continue
            peer, forward, microbatch, chunk = result
            send = Send(microbatch, action.chunk, peer, forward)
            events[rank].append(((end, 0, rank), send))
            events[peer].append(((end, 0, rank), Receive(microbatch, chunk, rank, forward)))
    return [[action for _, action in sorted(row, key=lambda event: event[0])] for row in events]


# An input of a pass: the rank that needs it, True for forward, microbatch, chunk.
Input = tuple[int, bool, int, int]


def part_of(rank: int, chunk: int, stages: int, v_shaped: bool = False) -> int:
    """Index in the model of a rank's chunk."""
    return (chunk + 1) * stages - 1 - rank if v_shaped and chunk % 2 else chunk * stages + rank


def _result(action: Compute, rank: int, stages: int, chunks: int, v_shaped: bool) -> Input | None:
    """The input that `action` computes, or None at the ends of the pipeline and for weight gradients."""
    forward = isinstance(action, Forward)
    part = part_of(rank, action.chunk, stages, v_shaped) + (1 if forward else -1)
    if not 0 <= part < stages * chunks or isinstance(action, BackwardWeight):
        return None
    chunk, place = divmod(part, stages)
    return part_of(place, chunk, stages, v_shaped) - chunk * stages, forward, action.microbatch, chunk


def _has_producer(action: Compute, rank: int, stages: int, chunks: int, v_shaped: bool) -> bool:
    """True if `action` takes its input from another chunk's pass.

    That is all but the first chunk's forward, the last chunk's backward and weight gradients.
    """
    part = part_of(rank, action.chunk, stages, v_shaped)
    last = 0 if isinstance(action, Forward) else stages * chunks - 1
    return part != last and not isinstance(action, BackwardWeight)
