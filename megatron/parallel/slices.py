"""Which part of the whole model's tensors a process holds."""

from __future__ import annotations

import dataclasses
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

    def segments(self) -> Iterator[tuple[int, Range]]:
        """Where in the local tensor each of `ranges` begins, and the range."""
        begin = 0
        for range_ in self.ranges:
            yield begin, range_
            begin += range_[1] - range_[0]

    def part(self, rows: list[Range]) -> GlobalSlice:
        """What only some of the local tensor's indices along `dim`, none of them padding, are of the whole."""
        ranges = []
        for begin, end in rows:
            for start, (first, last) in self.segments():
                common = overlap((begin, end), (start, start + last - first))
                if common is not None:
                    ranges.append((first + common[0] - start, first + common[1] - start))
        shape = self.shape if self.real is None else (self.real, *self.shape[1:])
        return GlobalSlice(shape, self.dim, tuple(ranges))


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
