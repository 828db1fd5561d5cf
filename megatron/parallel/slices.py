"""Slices of the whole model's tensors: the part of a tensor that one rank holds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator

from megatron.parallel.mesh import ALONE, Axis

Range = tuple[int, int]  # begin and end


@dataclasses.dataclass(frozen=True)
class GlobalSlice:
    """Shard spec of a parameter: the part of the whole model's tensor that this rank holds.

    Attributes:
        shape: shape of the whole tensor.
        dim: dimension that is split.
        ranges: indices of the whole tensor along `dim`, which the local tensor holds one range after the other.
        shared: rows of the local tensor that all ranks of `replicas` hold.
        replicas: tensor-parallel ranks that hold the shared rows.
        partial: each of `replicas` computes a partial sum of the gradient of the shared rows.
        num_valid_rows: rows of the whole tensor that are not padding of the vocabulary; None means all.
        expert_parallel: the ranks of the mesh's axis `expert` divide the tensor, instead of those of `tp`.
        matrices: matrices of equal size, one above the other, of which the tensor consists.
        transposed: each is [inputs, outputs] instead of [outputs, inputs].
    """

    shape: tuple[int, ...]
    dim: int
    ranges: tuple[Range, ...]
    shared: tuple[Range, ...] = ()
    replicas: Axis = ALONE
    partial: bool = False
    num_valid_rows: int | None = None
    expert_parallel: bool = False
    matrices: int = 1
    transposed: bool = False

    @property
    def local_shape(self) -> tuple[int, ...]:
        length = sum(end - begin for begin, end in self.ranges)
        return (*self.shape[: self.dim], length, *self.shape[self.dim + 1 :])

    @property
    def row(self) -> int:
        """Elements in a row of the local tensor."""
        return math.prod(self.local_shape[1:])

    def blocks(self) -> Iterator[tuple[Block, Block]]:
        """Blocks that make up the local tensor, each with the same block of the whole tensor."""
        assert self.dim == 0 or len(self.shape) == 2
        rows, row, begin = self.local_shape[0], self.row, 0
        for first, last in self.ranges:
            local = (begin, begin := begin + last - first)
            if self.dim == 0:
                yield Block(local, (0, row)), Block((first, last), (0, row))
            else:
                yield Block((0, rows), local), Block((0, rows), (first, last))


@dataclasses.dataclass(frozen=True)
class Block:
    """A rectangle of a tensor seen as a matrix, whose columns are all dimensions but the first."""

    rows: Range
    columns: Range

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]

    @property
    def index(self) -> tuple[slice, slice]:
        """Index of the block in the matrix."""
        return slice(*self.rows), slice(*self.columns)

    def intersect(self, other: Block) -> Block | None:
        """Intersection of two blocks."""
        rows, columns = overlap(self.rows, other.rows), overlap(self.columns, other.columns)
        return None if rows is None or columns is None else Block(rows, columns)

    def translated(self, source: Block, target: Block) -> Block:
        """Translate this part of `source` to the same part of `target`."""
        down, right = target.rows[0] - source.rows[0], target.columns[0] - source.columns[0]
        rows, columns = self.rows, self.columns
        return Block((rows[0] + down, rows[1] + down), (columns[0] + right, columns[1] + right))


def flat_blocks(begin: int, end: int, row: int) -> Iterator[Block]:
    """Split elements [begin, end) of a flattened matrix with rows of `row` elements into blocks, in order."""
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


def whole(*shape: int, replicas: Axis = ALONE, partial: bool = False) -> GlobalSlice:
    """A whole tensor, which all ranks of `replicas` hold; `partial` as for `GlobalSlice`."""
    rows = ((0, shape[0]),)
    return GlobalSlice(shape, 0, rows, shared=rows, replicas=replicas, partial=partial)


def overlap(a: Range, b: Range) -> Range | None:
    """Intersection of two ranges."""
    begin, end = max(a[0], b[0]), min(a[1], b[1])
    return (begin, end) if begin < end else None


def intersections(whole: Range, parts: Iterable[Range]) -> list[Range]:
    """Intersections of a range with each of `parts`; adjacent ones are merged."""
    result: list[Range] = []
    for part in parts:
        inside = overlap(whole, part)
        if inside is not None and result and result[-1][1] == inside[0]:
            result[-1] = (result[-1][0], inside[1])
        elif inside is not None:
            result.append(inside)
    return result


def subtract(whole: Range, holes: Iterable[Range]) -> list[Range]:
    """Ranges of `whole` that are in none of `holes`."""
    parts, begin = [], whole[0]
    for hole in sorted(h for h in (overlap(whole, hole) for hole in holes) if h):
        if begin < hole[0]:
            parts.append((begin, hole[0]))
        begin = max(begin, hole[1])
    return parts + ([(begin, whole[1])] if begin < whole[1] else [])
