"""Pipeline schedules that split backward passes: zero bubble, arXiv 2401.10241, and V-shaped ones, 2405.15362.

The gradient of a layer's input is needed by the stage before; the products for weight gradients can wait and fill
the bubble. A list is made for passes of equal time, or, with --pipeline-schedule auto, for given times and memory.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from megatron.parallel.schedules import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    one_and_two,
    part_of,
)

Duration = Callable[[int, Compute], float]
# Times of arrival and microbatches.
Queue = deque[tuple[float, int]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """The choice that a stage makes among the passes that it could run next.

    Attributes:
        limit: chunks of activations that it may hold, from forward until the weight gradients.
        backward_first: prefers a backward pass to a forward pass.
        early_chunks: prefers the first chunk among backward passes; otherwise the last.
        patience: waits for a pass whose input arrives within this share of the time of the weight gradients that it
            could run meanwhile.
    """

    limit: int
    backward_first: bool = True
    early_chunks: bool = False
    patience: float = 0.5


def list_schedule(
    policies: Sequence[Policy], chunks: int, microbatches: int, duration: Duration
) -> tuple[float, list[list[Compute]]]:
    """Run a pipeline against a clock: a stage that becomes free takes a pass by its policy. Two chunks are V-shaped.

    Microbatches enter in order. A stage keeps room for one activation of each later chunk, so that the oldest
    microbatch always goes on: there is no deadlock. Returns the time from the first start to the last end, and the
    passes of each stage.
    """
    ranks = [Rank(rank, chunks, policy, duration) for rank, policy in enumerate(policies)]
    schedule = run_ranks(ranks, microbatches, v_shaped=chunks > 1)
    return max(rank.free for rank in ranks), schedule


def run_ranks(ranks: Sequence[Rank], microbatches: int, v_shaped: bool) -> list[list[Compute]]:
    """Run a pipeline against a clock, in which each rank chooses its passes. Returns the passes of each rank."""
    following = _following(ranks, v_shaped)
    ranks[0].arrive(0.0, Forward, 0, microbatches)
    events = [(0.0, 0)]
    while events:
        now, rank = heapq.heappop(events)
        action, then = ranks[rank].choose(now)
        if then is not None:
            heapq.heappush(events, (then, rank))
        if action is None or (rank, type(action), action.chunk) not in following:
            continue
        assert then is not None
        peer, queue = following[rank, type(action), action.chunk]
        queue.append((then, action.microbatch))
        if then >= peer.free:  # otherwise it is asked when its pass ends
            heapq.heappush(events, (then, peer.rank))
    return [rank.actions for rank in ranks]


def _following(
    ranks: Sequence[Rank], v_shaped: bool
) -> dict[tuple[int, type[Compute], int], tuple[Rank, Queue]]:
    """The rank that takes the result of a pass, by its rank, kind and chunk, and the queue where it waits there."""
    stages, chunks = len(ranks), ranks[0].chunks
    places = sorted((part_of(r, c, stages, v_shaped), r, c) for r in range(stages) for c in range(chunks))
    forward: list[tuple[int, type[Compute], int]] = [(r, Forward, c) for _, r, c in places]
    backward: list[tuple[int, type[Compute], int]] = [(r, BackwardInput, c) for _, r, c in reversed(places)]
    return {
        one: (ranks[rank], ranks[rank].waiting[kind, chunk])
        for one, (rank, kind, chunk) in itertools.pairwise([*forward, *backward])
    }


class Rank:
    """A stage in `run_ranks`, which chooses its passes by a policy.

    Attributes:
        free: time at which its current pass ends.
        waiting: inputs of its passes, with their times of arrival, by kind of pass and chunk.
        weights: weight gradients that are left, oldest first.
        held: chunks of activations in memory.
    """

    def __init__(self, rank: int, chunks: int, policy: Policy, duration: Duration) -> None:
        self.rank, self.chunks, self.policy, self.duration = rank, chunks, policy, duration
        self.free, self.held = 0.0, 0
        self.actions: list[Compute] = []
        self.weights: deque[BackwardWeight] = deque()
        self.waiting: dict[tuple[type, int], Queue] = {
            (kind, chunk): deque() for kind in (Forward, BackwardInput) for chunk in range(chunks)
        }
        backward: list[tuple[type[Compute], int]] = [(BackwardInput, c) for c in range(chunks)]
        backward = backward if policy.early_chunks else backward[::-1]
        forward: list[tuple[type[Compute], int]] = [(Forward, c) for c in reversed(range(chunks))]
        self.order = backward + forward if policy.backward_first else forward + backward

    def arrive(self, time: float, kind: type, chunk: int, microbatches: int) -> None:
        self.waiting[kind, chunk].extend((time, microbatch) for microbatch in range(microbatches))

    def has_room(self, chunk: int) -> bool:
        return self.held < self.policy.limit - (self.chunks - 1 - chunk)

    def choose(self, now: float) -> tuple[Compute | None, float | None]:
        """The pass that starts now, if any, and the time at which to ask again, if it is known."""
        if now < self.free:
            return None, None  # asked again when the pass ends
        next_arrival = None
        for kind, chunk in self.order:
            queue = self.waiting[kind, chunk]
            if not queue or (kind is Forward and not self.has_room(chunk)):
                continue
            arrival, microbatch = queue[0]
            if arrival <= now:
                queue.popleft()
                return self.start(now, kind(microbatch, chunk))
            next_arrival = arrival if next_arrival is None else min(arrival, next_arrival)
        if self.weights:
            patience = self.policy.patience * self.duration(self.rank, self.weights[0])
            if next_arrival is None or next_arrival >= now + patience:
                return self.start(now, self.weights.popleft())
        return None, next_arrival

    def start(self, now: float, action: Compute) -> tuple[Compute, float]:
        kind = type(action)
        if kind is Forward:
            self.held += 1
        elif kind is BackwardInput:
            self.weights.append(BackwardWeight(action.microbatch, action.chunk))
        else:
            self.held -= 1
        self.actions.append(action)
        self.free = now + self.duration(self.rank, action)
        return action, self.free


def zb_h1(stages: int, chunks: int, microbatches: int) -> list[list[Compute]]:
    """ZB-H1 (2401.10241 section 2.3): 1F1B in which weight gradients of rank p lag p microbatches behind.

    The bubble is a third of 1F1B's, and every rank holds `stages` microbatches at most, as rank 0 does with 1F1B.
    """
    assert chunks == 1
    return [lagging(microbatches, stages - rank - 1, rank) for rank in range(stages)]


def zb_h2(stages: int, chunks: int, microbatches: int) -> list[list[Compute]]:
    """ZB-H2 (2401.10241 section 2.2): twice the warm-up of 1F1B, and weight gradients that lag twice as far.

    No rank idles between its first and its last pass if there are 2 `stages` - 1 microbatches, all of which it holds.
    """
    assert chunks == 1
    return [lagging(microbatches, 2 * (stages - rank - 1), 2 * rank) for rank in range(stages)]


def lagging(microbatches: int, warmup: int, lag: int) -> list[Compute]:
    """`warmup` forwards, then forward, backward and the weight gradients of `lag` microbatches before, in turn."""
    forwards = [Forward(microbatch, 0) for microbatch in range(microbatches)]
    actions: list[Compute] = list(forwards[:warmup])
    for microbatch in range(microbatches):
        actions += forwards[warmup + microbatch : warmup + microbatch + 1]
        actions.append(BackwardInput(microbatch, 0))
        if microbatch >= lag:
            actions.append(BackwardWeight(microbatch - lag, 0))
    actions += [BackwardWeight(m, 0) for m in range(max(microbatches - lag, 0), microbatches)]
    return actions


def zb_v(stages: int, chunks: int, microbatches: int) -> list[list[Compute]]:
    """ZB-V (2405.15362 section 3): no bubble but the pipeline's fill, in the memory of 1F1B.

    Two chunks per rank in the shape of a V; every rank holds `stages` microbatches of both at most.
    """
    assert chunks == 2
    lists = [
        list_schedule([policy] * stages, chunks, microbatches, one_and_two)
        for policy in policies(chunks, 2 * stages)
    ]
    return min(lists, key=lambda one: one[0])[1]


def dualpipe_v(stages: int, chunks: int, microbatches: int) -> list[list[Compute]]:
    """DualPipe-V (2412.19437 section 3.2.1, cut in half): a forward pass beside each backward pass.

    Two chunks per rank in the shape of a V, and 2 `stages` microbatches or more. Rank p holds at most `stages` + 1
    microbatches of both chunks. Here a pair of passes runs one after the other.
    """
    assert chunks == 2 and microbatches >= 2 * stages
    return [_dualpipe_rank(stages, rank, microbatches) for rank in range(stages)]


def _dualpipe_rank(stages: int, rank: int, microbatches: int) -> list[Compute]:
    actions: list[Compute] = []
    next_forward, next_backward, weights = [0, 0], [0, 0], deque[BackwardWeight]()

    def forward(chunk: int) -> None:
        actions.append(Forward(next_forward[chunk], chunk))
        next_forward[chunk] += 1

    def backward(chunk: int, *, split: bool = False) -> None:
        microbatch = next_backward[chunk]
        next_backward[chunk] += 1
        actions.append((BackwardInput if split else Backward)(microbatch, chunk))
        if split:
            weights.append(BackwardWeight(microbatch, chunk))

    after = stages - rank - 1
    for _ in range(2 * after):
        forward(0)
    for _ in range(rank + 1):
        forward(0)
        forward(1)
    for _ in range(after):
        backward(1, split=True)
        actions.append(weights.popleft())
        forward(1)
    for _ in range(microbatches - 2 * stages + rank + 1):
        forward(0)
        backward(1)
        forward(1)
        backward(0)
    for _ in range(after):
        backward(1)
        forward(1)
        backward(0)
    for i in range(rank + 1):
        backward(1, split=2 * i > rank if rank % 2 == 0 else 2 * i >= rank + 1)
        backward(0, split=2 * i >= rank)
    for _ in range(after):
        actions.append(weights.popleft())
        backward(0, split=True)
    return [*actions, *weights]


def policies(chunks: int, limit: int) -> Iterator[Policy]:
    """Policies within a limit of memory, the same for all stages."""
    for backward_first, early_chunks, patience in itertools.product(
        (False, True), (False, True)[:chunks], (0.0, 0.5, 1.0)
    ):
        yield Policy(limit=limit, backward_first=backward_first, early_chunks=early_chunks, patience=patience)
