"""The place of a step's validation in the actions of each stage (--enable-optimizer-post-validation)."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from megatron.parallel.schedules import Action, Forward, Receive, Send, Validate

# Number of transfers, by the stages that they come from and go to.
Ways = collections.Counter[tuple[int, int]]


def with_validation(lists: Sequence[Sequence[Action]]) -> list[list[Action]]:
    """Insert a `Validate` into the actions of each stage, as late as possible.

    It stands before the first backward pass of its stage, and no transfer begins before that of one stage and ends
    after that of another, so that the passes before it can be repeated.
    """
    ends = [next(i for i, action in enumerate(row) if not _is_forward(action)) for row in lists]
    while (earlier := _without_open_transfers(lists, ends)) != ends:
        ends = earlier
    return [[*row[:end], Validate(), *row[end:]] for row, end in zip(lists, ends, strict=True)]


def _is_forward(action: Action) -> bool:
    return isinstance(action, Forward) or (isinstance(action, Send | Receive) and action.forward)


def _without_open_transfers(lists: Sequence[Sequence[Action]], ends: list[int]) -> list[int]:
    """Ends of the stages' first actions, before each transfer whose other side is not among those up to `ends`."""
    sent, received = Ways(), Ways()
    for rank, (row, end) in enumerate(zip(lists, ends, strict=True)):
        for action in row[:end]:
            if isinstance(action, Send):
                sent[rank, action.peer] += 1
            elif isinstance(action, Receive):
                received[action.peer, rank] += 1
    both = sent & received
    return [_first_beyond(both, rank, row[: ends[rank]]) for rank, row in enumerate(lists)]


def _first_beyond(both: Ways, rank: int, actions: Sequence[Action]) -> int:
    """Index of the first transfer of stage `rank` beyond those in `both`; the length if there is none."""
    left = both.copy()
    for i, action in enumerate(actions):
        if isinstance(action, Send | Receive):
            way = (rank, action.peer) if isinstance(action, Send) else (action.peer, rank)
            left[way] -= 1
            if left[way] < 0:
                return i
    return len(actions)
