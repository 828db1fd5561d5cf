"""Division of a sequence among the ranks of context parallelism.

The sequence is cut into 2 C chunks, and rank r of C has the chunks r and 2 C - 1 - r. A causal query attends to the
keys before it, so the pairs of a query and a key are then as many on every rank.
"""

from __future__ import annotations

import torch
from torch import Tensor


def zigzag_ranges(length: int, rank: int, size: int) -> list[tuple[int, int]]:
    """Positions of a rank, [begin, end), of a sequence of `length`, a multiple of 2 · `size`."""
    if size == 1:
        return [(0, length)]
    each = length // (2 * size)
    return [(i * each, (i + 1) * each) for i in (rank, 2 * size - 1 - rank)]


def zigzag_shard(x: Tensor, dim: int, rank: int, size: int) -> Tensor:
    """The positions of a rank of `x`, whose dimension `dim` is the sequence."""
    parts = [x.narrow(dim, begin, end - begin) for begin, end in zigzag_ranges(x.shape[dim], rank, size)]
    return torch.cat(parts, dim) if size > 1 else x


def zigzag_restore(x: Tensor, size: int) -> Tensor:
    """[size, 2 c, ...] the positions of every rank, to [2 c · size, ...] in the order of the sequence."""
    first, second = x.unflatten(1, (2, -1)).unbind(1)
    return torch.cat((first, second.flip(0))).flatten(0, 1) if size > 1 else x[0]
