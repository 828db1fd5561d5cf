"""Flat memory of one kind of value, parameters or gradients, for all buckets.

A bucket that is not sharded stands in one flat tensor with the others. Of a sharded bucket only the local shard does;
the whole bucket has memory from `allocate` to `free`. Its address may change, but the views that modules and autograd
hold of it stay valid, since they share its storage.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.optim.layout import Bucket, FlatParam
from megatron.parallel.slices import overlap


class FlatMemory:
    """Memory of the parameters, or of the gradients, of this rank.

    Attributes:
        flat: what exists all the time: the local shards of sharded buckets, and whole buckets of the others.
        whole: by bucket, all of its elements.
        shards: by bucket, its local shard; a view of `flat`.
        sharded: by bucket, true if `whole` exists only from `allocate` to `free`.
    """

    def __init__(
        self, buckets: Sequence[Bucket], sharded: Sequence[bool], *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.buckets, self.sharded = buckets, sharded
        self._starts = [bucket.start for bucket in buckets]
        sizes = [bucket.end - bucket.start for bucket in buckets]
        shards = [slice(*(i - bucket.start for i in bucket.shard)) for bucket in buckets]
        kept = [s.stop - s.start if cut else n for s, n, cut in zip(shards, sizes, sharded, strict=True)]
        self.flat = torch.zeros(sum(kept), dtype=dtype, device=device)
        self.whole: list[Tensor] = []
        self.shards: list[Tensor] = []
        for part, size, shard, cut in zip(self.flat.split(kept), sizes, shards, sharded, strict=True):
            self.whole.append(torch.empty(size, dtype=dtype, device=device) if cut else part)
            self.shards.append(part if cut else part[shard])
            if cut:
                resize(self.whole[-1], 0)

    def index(self, param: FlatParam) -> int:
        """Index of the bucket of a parameter."""
        return bisect.bisect_right(self._starts, param.start) - 1

    def view(self, param: FlatParam) -> Tensor:
        """View of a parameter's elements in its shape. It has memory while its bucket does."""
        index = self.index(param)
        if self.has(index):
            return param.view(self.whole[index], self._starts[index])
        self.allocate(index)  # torch makes no view of a storage without memory
        view = param.view(self.whole[index], self._starts[index])
        self.free(index)
        return view

    def has(self, index: int) -> bool:
        """True if all elements of a bucket have memory."""
        return self.whole[index].untyped_storage().nbytes() > 0

    def allocate(self, index: int) -> None:
        """Allocate memory for all elements of a sharded bucket, without values."""
        resize(self.whole[index], self.whole[index].numel())

    def free(self, index: int) -> None:
        """Free the memory that `allocate` got."""
        resize(self.whole[index], 0)

    def write(self, param: FlatParam, values: Tensor) -> None:
        """Set a parameter's elements, as far as they exist all the time, to `values` of its shape."""
        index = self.index(param)
        if not self.sharded[index]:
            self.view(param).copy_(values)
            return
        for part, begin in shard_parts(self.buckets[index], param, self.shards[index]):
            part.copy_(values.reshape(-1)[begin : begin + len(part)])


def shard_parts(bucket: Bucket, param: FlatParam, shard: Tensor) -> list[tuple[Tensor, int]]:
    """The part of a bucket's local shard that belongs to a parameter, and its index in it; empty if there is none."""
    both = overlap((param.start, param.end), bucket.shard)
    if both is None:
        return []
    return [(shard[both[0] - bucket.shard[0] : both[1] - bucket.shard[0]], both[0] - param.start)]


def resize(x: Tensor, elements: int) -> None:
    """Change the memory of the storage that `x` fills, without keeping values."""
    # `UntypedStorage.resize_` as an operation, which a dry run can count.
    torch.ops.inductor.resize_storage_bytes_(x, elements * x.element_size())
