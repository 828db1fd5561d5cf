"""Which part of the whole model's tensors a process holds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator

Range = tuple[int, int]  # begin and end


@dataclasses.dataclass(frozen=True)
class GlobalSlice:
    """The part of a whole model's tensor that a process holds.

    Attributes:
        shape: of the whole tensor.
        dim: the dimension that is divided.
        ranges: of the whole tensor's indices along `dim`: the local tensor holds them one after the other.
        shared: ranges of the local tensor's rows that every process of the tensor-parallel axis holds too.
        partial: the gradient of the shared rows is this process's share, and has to be summed over that axis.
        real: rows of the whole tensor that take part in the model; those after them pad the vocabulary.
    """

    shape: tuple[int, ...]
    dim: int
    ranges: tuple[Range, ...]
    shared: tuple[Range, ...] = ()
    partial: bool = False
    real: int | None = None

    @property
    def local_shape(self) -> tuple[int, ...]:
        length = sum(end - begin for begin, end in self.ranges)
        return (*self.shape[: self.dim], length, *self.shape[self.dim + 1 :])

    @property
    def row(self) -> int:
        """Elements of a row of the local tensor."""
        return math.prod(self.local_shape[1:])

    def blocks(self) -> Iterator[tuple[Block, Block]]:
        """The blocks that the local tensor consists of: where in it they lie, and where in the whole tensor."""
        rows, row = self.local_shape[0], self.row
        if self.dim > 0:
            assert self.dim == 1 and len(self.shape) == 2 and len(self.ranges) == 1
            yield Block((0, rows), (0, row)), Block((0, rows), self.ranges[0])
            return
        begin = 0
        for first, last in self.ranges:
            yield Block((begin, begin + last - first), (0, row)), Block((first, last), (0, row))
            begin += last - first


@dataclasses.dataclass(frozen=True)
class Block:
    """A part of a tensor seen as a matrix: of its first dimension, and of all others taken as one."""

    rows: Range
    columns: Range

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]

    def meet(self, other: Block) -> Block | None:
        """What two blocks have in common, if anything."""
        rows, columns = overlap(self.rows, other.rows), overlap(self.columns, other.columns)
        return None if rows is None or columns is None else Block(rows, columns)

    def moved(self, source: Block, target: Block) -> Block:
        """Where it lies if `source`, which it is a part of, is moved to `target`."""
        down, right = target.rows[0] - source.rows[0], target.columns[0] - source.columns[0]
        rows, columns = self.rows, self.columns
        return Block((rows[0] + down, rows[1] + down), (columns[0] + right, columns[1] + right))


def flat_blocks(begin: int, end: int, row: int) -> Iterator[Block]:
    """The elements [begin, end) of a flattened matrix whose rows have `row` elements, as blocks in their order."""
    first, left = divmod(begin, row)
    last, right = divmod(end, row)
    if first == last:
        yield Block((first, first + 1), (left, right))
        return
    if left:
        yield Block((first, first + 1), (left, row))
        first += 1
    if first < last:
        yield Block((first, last), (0, row))
    if right:
        yield Block((last, last + 1), (0, right))


def whole(*shape: int, partial: bool = False) -> GlobalSlice:
    """Every process holds all of it. `partial`: each computes only a share of the gradient."""
    return GlobalSlice(shape, 0, ((0, shape[0]),), shared=((0, shape[0]),), partial=partial)


def overlap(a: Range, b: Range) -> Range | None:
    """What two ranges have in common, if anything."""
    begin, end = max(a[0], b[0]), min(a[1], b[1])
    return (begin, end) if begin < end else None


def common(whole: Range, parts: Iterable[Range]) -> list[Range]:
    """What of each of `parts` lies in a range; parts that touch become one."""
    result: list[Range] = []
    for part in parts:
        inside = overlap(whole, part)
        if inside is not None and result and result[-1][1] == inside[0]:
            result[-1] = (result[-1][0], inside[1])
        elif inside is not None:
            result.append(inside)
    return result


def without(whole: Range, holes: Iterable[Range]) -> list[Range]:
    """The parts of a range that are in none of `holes`."""
    parts, begin = [], whole[0]
    for hole in sorted(h for h in (overlap(whole, hole) for hole in holes) if h):
        if begin < hole[0]:
            parts.append((begin, hole[0]))
        begin = max(begin, hole[1])
    return parts + ([(begin, whole[1])] if begin < whole[1] else [])
