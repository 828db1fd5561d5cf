"""Where each parameter of this process's part of a model lies in flat memory, and how that is cut into buckets."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from torch import Tensor, nn

from megatron.parallel.mesh import Axis
from megatron.parallel.parameters import Init
from megatron.parallel.slices import GlobalSlice, Range, without

# Each parameter begins on a boundary of 64 elements, which is what matrix kernels want of an address.
ALIGNMENT = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """A parameter of the flat memory."""

    name: str  # in the whole model
    chunk: int
    place: GlobalSlice
    init: Init
    start: int
    tied: bool  # the first and the last stage both hold it
    copy: bool  # and this is the last stage's

    @property
    def end(self) -> int:
        return self.start + math.prod(self.place.local_shape)

    def view(self, flat: Tensor) -> Tensor:
        """This parameter's part of one of the flat tensors, in its own shape."""
        return flat[self.start : self.end].view(self.place.local_shape)

    def counted(self, tp: Axis) -> list[Range]:
        """The rows of the local tensor that no other process counts and that do not pad the vocabulary."""
        place, rows = self.place, self.place.local_shape[0]
        if self.copy:
            return []
        if place.real is not None:
            rows = min(max(place.real - place.ranges[0][0], 0), rows)
        return without((0, rows), place.shared if tp.rank > 0 else ())

    def flat(self, rows: Iterable[Range]) -> list[Range]:
        """Ranges of rows as ranges of the flat memory."""
        start, row = self.start, self.place.row
        return [(start + begin * row, start + end * row) for begin, end in rows if begin < end]


@dataclasses.dataclass(frozen=True)
class Bucket:
    """A range of the flat memory that is reduced over the replicas at once."""

    start: int
    end: int
    owned: Range  # what this replica updates
    decays: bool
    tied: bool
    entries: tuple[Entry, ...]


def lay_out(chunks: list[nn.Module], *, bucket_size: int, shards: Axis) -> list[Bucket]:
    """Put the parameters of `chunks` into buckets of about `bucket_size` elements, in the order of forward.

    Those that weight decay applies to (matrices and embeddings; not biases and scales of normalisations) come
    first, and vectors that every tensor-parallel process holds come last. A table that both ends of a pipeline
    hold has a bucket of its own, so that it is divided alike on both.

    Args:
        shards: the replicas that every bucket is divided among; of size 1 where each owns it whole.
    """
    found = [(name, p, i) for i, chunk in enumerate(chunks) for name, p in chunk.named_parameters()]

    def kind(item: tuple[str, nn.Parameter, int]) -> tuple[bool, bool, bool]:
        p = item[1]
        return p.dim() < 2, p.tied is not None, p.dim() < 2 and bool(p.place.shared)

    groups: list[list[tuple[str, nn.Parameter, int]]] = []
    size = 0
    for item in sorted(found, key=kind):
        if not groups or size >= bucket_size or kind(groups[-1][-1])[:2] != kind(item)[:2]:
            groups.append([])
            size = 0
        groups[-1].append(item)
        size += math.prod(item[1].place.local_shape)

    buckets: list[Bucket] = []
    end = 0
    for group in groups:
        start, entries = end, []
        for name, p, chunk in group:
            entry = Entry(
                name=p.tied or name,
                chunk=chunk,
                place=p.place,
                init=p.init,
                start=end,
                tied=p.tied is not None,
                copy=p.tied not in (None, name),
            )
            entries.append(entry)
            end = start + round_up(entry.end - start, ALIGNMENT)
        end = start + round_up(end - start, ALIGNMENT * shards.size)
        each = (end - start) // shards.size
        owned = (start + shards.rank * each, start + (shards.rank + 1) * each)
        first = entries[0]
        decays = len(first.place.shape) >= 2
        buckets.append(Bucket(start, end, owned, decays, first.tied, tuple(entries)))
    return buckets


def round_up(n: int, unit: int) -> int:
    """The least multiple of `unit` that is not less than `n`."""
    return -(-n // unit) * unit
