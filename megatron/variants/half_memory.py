"""V-shaped pipeline schedules in half and in a third of the memory of 1F1B: V-Half and V-Min, arXiv 2405.15362.

Every rank repeats a block of passes: the two forwards and backwards of a microbatch at fixed times, and the next
microbatch's six units of time later. A block's length from the first forward to the last backward determines how many
microbatches are in memory at once. Weight gradients run where a rank would be idle, or where memory is full.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Iterator

from megatron.parallel.schedules import BackwardInput, BackwardWeight, Compute, Forward, one_and_two, simulate
from megatron.variants.zero_bubble import Policy, Rank, run_ranks

# Units of time between microbatches: each rank has three passes for each of its two chunks.
PERIOD = 6
# The passes of a block in the order in which a microbatch takes them: down and up again, in both directions.
PASSES: tuple[tuple[type[Compute], int], ...] = (
    (Forward, 0),
    (Forward, 1),
    (BackwardInput, 1),
    (BackwardInput, 0),
)
# Units of time between neighboring ranks in each of `PASSES`. V-Min goes on at once; V-Half waits on half of the ways,
# which gives weight gradients room. A rank holds one more microbatch on its first chunk for as many as it holds fewer
# on its second, so all ranks have the same memory.
V_MIN_STEPS = ((1, 1, 1, 1),)
V_HALF_STEPS = ((2, 1, 2, 1), (1, 2, 1, 2))


def v_half(stages: int, chunks: int, microbatches: int) -> list[list[Compute]]:
    """V-Half (2405.15362 section 3): half of ZB-V's memory, and half of 1F1B's bubble.

    A rank holds at most (p + 2) // 2 microbatches of both chunks, where 1F1B's first rank holds p.
    """
    assert chunks == 2
    return _fastest(stages, microbatches, 2 * ((stages + 2) // 2), V_HALF_STEPS)


def v_min(stages: int, chunks: int, microbatches: int) -> list[list[Compute]]:
    """V-Min (2405.15362 section 3): a third of ZB-V's memory, and two thirds of 1F1B's bubble.

    A rank holds at most (p + 4) // 3 microbatches of both chunks, where 1F1B's first rank holds p.
    """
    assert chunks == 2
    return _fastest(stages, microbatches, 2 * ((stages + 4) // 3), V_MIN_STEPS)


Block = tuple[tuple[int, ...], ...]


def _fastest(
    stages: int, microbatches: int, limit: int, steps: tuple[tuple[int, ...], ...]
) -> list[list[Compute]]:
    """The list with the least bubble among those of all blocks, for passes of equal times."""
    block = _best_block(stages, limit, steps)
    return _repeat(block, microbatches, limit)


@functools.cache
def _best_block(stages: int, limit: int, steps: tuple[tuple[int, ...], ...]) -> Block:
    microbatches = 2 * stages  # more of them take six units of time each
    found = []
    for block in _blocks(stages, steps):
        lists = _repeat(block, microbatches, limit)
        if all(len(row) == PERIOD * microbatches for row in lists):  # otherwise the memory is too small
            timeline = simulate(lists, stages, one_and_two, v_shaped=True)
            found.append((max(row[-1][2] for row in timeline), block))
    return min(found)[1]


def _blocks(stages: int, steps: tuple[tuple[int, ...], ...]) -> Iterator[Block]:
    """Times of `PASSES` on each rank, those whose repetitions do not collide.

    A microbatch may wait where it turns: at the last rank, at the loss, and at the last rank again.
    """
    for ways, turns in itertools.product(steps, itertools.product(range(1, 5), repeat=3)):
        lengths = (way * (stages - 1) + turn for way, turn in zip(ways, turns, strict=False))
        starts = list(itertools.accumulate(lengths, initial=0))
        block = tuple(
            tuple(
                start + way * ranks
                for start, way, ranks in zip(starts, ways, (rank, up, rank, up), strict=True)
            )
            for rank, up in zip(range(stages), reversed(range(stages)), strict=True)
        )
        if all(len({time % PERIOD for time in times}) == len(times) for times in block):
            yield block


def _repeat(block: Block, microbatches: int, limit: int) -> list[list[Compute]]:
    """The passes of each rank, in the order of a block that is repeated. Incomplete if they need more memory."""
    policy = Policy(limit=limit, patience=1.0)
    ranks = [_BlockRank(rank, policy, times, microbatches) for rank, times in enumerate(block)]
    return run_ranks(ranks, microbatches, v_shaped=True)


class _BlockRank(Rank):
    """A rank whose forward and backward passes have a fixed order."""

    def __init__(self, rank: int, policy: Policy, times: tuple[int, ...], microbatches: int) -> None:
        super().__init__(rank, 2, policy, one_and_two)
        slots = itertools.product(range(microbatches), range(len(PASSES)))
        ordered = sorted(slots, key=lambda slot: times[slot[1]] + PERIOD * slot[0])
        self.left = deque(PASSES[number] for _, number in ordered)
        self.order = [self.left[0]]

    def has_room(self, chunk: int) -> bool:
        return self.held < self.policy.limit

    def start(self, now: float, action: Compute) -> tuple[Compute, float]:
        if not isinstance(action, BackwardWeight):
            self.left.popleft()
            self.order = [self.left[0]] if self.left else []
        return super().start(now, action)
