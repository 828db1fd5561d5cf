"""Pipeline schedules as data: the order of forward and backward passes on each rank.

A schedule is a list of actions per pipeline rank, made by a pure function of (stages, chunks per rank, microbatches).
The executor (`pipeline.py`) runs the lists, `simulate` runs them against a clock, and `tools/draw_figures.py` draws the
result. This module does not use torch.

A rank's position in the pipeline is its stage. With more than one chunk per rank (virtual stages), the layers are split
into `stages * chunks` parts, and chunk c of rank p is part `c * stages + p`.

Source: 1F1B (PipeDream-Flush) and model chunks, arXiv 2104.04473 section 2.2.
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


Compute = Forward | Backward
Action = Forward | Backward | Send | Receive


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
# By --pipeline-schedule. `megatron.plugins` adds to it.
SCHEDULES: dict[str, Schedule] = {"1f1b": one_forward_one_backward}


def alternate(forwards: Sequence[Compute], backwards: Sequence[Compute], warmup: int) -> list[Compute]:
    """`warmup` forwards, then one forward and one backward in turn, then the remaining backwards."""
    actions = list(forwards[:warmup])
    steady = forwards[warmup:]
    for forward, backward in zip(steady, backwards, strict=False):
        actions += (forward, backward)
    actions += backwards[len(steady) :]
    return actions


def one_and_two(_: int, action: Compute) -> float:
    """Duration of a pass if a backward takes twice as long as a forward."""
    return 1.0 if isinstance(action, Forward) else 2.0


# A simulated schedule: (action, start, end) of each rank, in order.
Timeline = list[list[tuple[Compute, float, float]]]


def simulate(
    schedule: Sequence[Sequence[Action]],
    stages: int,
    duration: Callable[[int, Compute], float] = one_and_two,
    transfer_time: float = 0.0,
) -> Timeline:
    """Simulate a schedule: each pass starts as soon as its rank is free and its input has arrived.

    Args:
        schedule: actions of each rank. `Send` and `Receive` are ignored, since transfers overlap with computation.
        duration: gives the duration of a pass on a rank.
        transfer_time: time from the end of a pass to the arrival of its result on another rank.
    """
    todo = [[a for a in actions if isinstance(a, Forward | Backward)] for actions in schedule]
    chunks = 1 + max(action.chunk for actions in todo for action in actions)
    timeline: Timeline = [[] for _ in todo]
    arrival: dict[tuple[int, Compute], float] = {}  # (consuming rank, consuming compute) -> time
    waiting: set[tuple[int, Compute]] = set()
    ready = list(range(stages))
    while ready:
        rank = ready.pop()
        row = timeline[rank]
        while len(row) < len(todo[rank]):
            action = todo[rank][len(row)]
            arrived = arrival.get((rank, action))
            if arrived is None and _has_producer(action, rank, stages, chunks):
                waiting.add((rank, action))
                break
            start = max(arrived or 0.0, row[-1][2] if row else 0.0)
            end = start + duration(rank, action)
            row.append((action, start, end))
            consumer = _consumer(action, rank, stages, chunks)
            if consumer is not None:
                arrival[consumer] = end + (transfer_time if consumer[0] != rank else 0.0)
                if consumer in waiting:
                    waiting.remove(consumer)
                    ready.append(consumer[0])
    assert not waiting, f"the schedule deadlocks: {waiting} are never reached"
    return timeline


def with_transfers(schedule: Sequence[Sequence[Compute]], stages: int) -> list[list[Action]]:
    """Add the point-to-point transfers to a schedule, in an order that cannot deadlock.

    The simulator's clock puts all transfers and passes of all ranks in one order, and each rank's list is its part of
    that order. A transfer comes at the end of the pass that produces it, before the passes that start at that moment.
    So the first remaining action in the order can always run: even if a send blocks until its receive, no ranks wait in
    a cycle. For the same reason both ranks of a pair list their transfers, in either direction, in the same order.

    Consecutive chunks on the same rank (`stages` is 1) need no transfer.
    """
    chunks = 1 + max(action.chunk for actions in schedule for action in actions)
    # The keys (time, transfers first, rank) are distinct: a rank starts and ends one pass at a time.
    events: list[list[tuple[tuple[float, int, int], Action]]] = [[] for _ in schedule]
    for rank, row in enumerate(simulate(schedule, stages)):
        for action, start, end in row:
            events[rank].append(((start, 1, rank), action))
            consumer = _consumer(action, rank, stages, chunks)
            if consumer is None or consumer[0] == rank:
                continue
            peer, use = consumer
            forward = isinstance(action, Forward)
            send = Send(action.microbatch, action.chunk, peer, forward)
            receive = Receive(use.microbatch, use.chunk, rank, forward)
            events[rank].append(((end, 0, rank), send))
            events[peer].append(((end, 0, rank), receive))
    return [[action for _, action in sorted(row, key=lambda event: event[0])] for row in events]


def _consumer(action: Compute, rank: int, stages: int, chunks: int) -> tuple[int, Compute] | None:
    """Rank and pass that need the result of `action`, or None at the ends of the pipeline."""
    step = 1 if isinstance(action, Forward) else -1
    part = action.chunk * stages + rank + step
    if not 0 <= part < stages * chunks:
        return None
    return part % stages, type(action)(action.microbatch, part // stages)


def _has_producer(action: Compute, rank: int, stages: int, chunks: int) -> bool:
    """True if `action` takes its input from another chunk's pass.

    That is all but the first chunk's forward and the last chunk's backward.
    """
    part = action.chunk * stages + rank
    return part != (0 if isinstance(action, Forward) else stages * chunks - 1)
