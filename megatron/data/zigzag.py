"""Division of a sequence among the ranks of context parallelism.

The sequence is cut into segments and each segment into 2 C chunks, of which rank r of C has the chunks r and
2 C - 1 - r. A causal query attends to the keys before it, so every rank has equally many pairs of a query and a key in
a document of one or more segments. One segment balances a long document, many segments balance short documents.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

MIN_CHUNK = 64  # with more than two segments; kernels of attention take blocks of about so many queries


@dataclasses.dataclass(frozen=True)
class Zigzag:
    """The positions of each rank, in order its rows.

    Attributes:
        length: positions of the sequence; with several ranks a multiple of 2 · size · segments.
        size: number of ranks.
        segments: parts of the sequence that are divided alike.
    """

    length: int
    size: int
    segments: int = 1

    @classmethod
    def of(cls, length: int, size: int, *, documents: bool) -> Zigzag:
        """One segment, but with `documents`, which attention keeps apart, as many as divide the sequence in chunks of
        `MIN_CHUNK` positions or more; two if that are none or one, and the length allows it."""
        each = length // (2 * size)
        most = max(each // MIN_CHUNK, 2) if documents and size > 1 else 1
        return cls(length, size, next(n for n in range(most, 0, -1) if each % n == 0))

    @property
    def chunk(self) -> int:
        """Positions of a chunk."""
        return self.length // (2 * self.size * self.segments)

    def places(self, rank: int) -> tuple[int, int]:
        """The chunks of a rank in each segment."""
        return rank, 2 * self.size - 1 - rank

    def positions(self, rank: int, rows: Any) -> Any:
        """The positions of a rank's rows, an integer or a tensor of integers."""
        first, second = self.places(rank)
        half, within = rows // self.chunk, rows % self.chunk
        return within + (half // 2 * 2 * self.size + first + half % 2 * (second - first)) * self.chunk

    def ranges(self, rank: int) -> list[tuple[int, int]]:
        """Positions of a rank, [begin, end) of each chunk."""
        if self.size == 1:
            return [(0, self.length)]
        begins = (self.positions(rank, i * self.chunk) for i in range(2 * self.segments))
        return [(begin, begin + self.chunk) for begin in begins]

    def shard(self, x: Tensor, dim: int, rank: int) -> Tensor:
        """The rows of a rank of `x`, whose dimension `dim` is the sequence."""
        rows = torch.arange(self.length // self.size, device=x.device)
        return x.index_select(dim, self.positions(rank, rows)) if self.size > 1 else x

    def restore(self, x: Tensor) -> Tensor:
        """[size, rows, ...] of every rank, to [length, ...] in the order of the sequence."""
        if self.size == 1:
            return x[0]
        first, second = x.unflatten(1, (self.segments, 2, -1)).unbind(2)
        return torch.cat((first.transpose(0, 1), second.flip(0).transpose(0, 1)), 1).flatten(0, 2)
