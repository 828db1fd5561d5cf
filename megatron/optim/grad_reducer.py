"""Reduction of gradients over the data-parallel group, bucket by bucket."""

from __future__ import annotations

import collections
from collections.abc import Iterable

import torch
from torch import Tensor

from megatron.optim.layout import Bucket
from megatron.optim.memory import FlatMemory
from megatron.parallel.collectives import (
    Pending,
    all_reduce_sum,
    start_all_reduce,
    start_reduce,
    start_reduce_scatter,
)
from megatron.parallel.config import ParallelConfig
from megatron.parallel.mesh import Axis, Mesh
from megatron.parallel.slices import intersections


class GradReducer:
    """Reduces gradients. With --overlap-grad-reduce, starts on each bucket as soon as its gradients are complete.

    With --num-distributed-optimizer-instances, gradients are first summed within an instance; `finish` then sums the
    local shards over the instances.

    Sharded gradients are reduced in the backward pass of every microbatch, and added to the local shard.

    Attributes:
        reducing: by bucket index, the gradients being reduced and their pending communication.
    """

    def __init__(self, memory: FlatMemory, buckets: list[Bucket], mesh: Mesh, config: ParallelConfig) -> None:
        """`memory` is that of the fp32 gradients."""
        self.memory, self.buckets, self.mesh = memory, buckets, mesh
        self.overlap, self.in_bf16 = config.overlap_grad_reduce, config.grad_reduce_in_bf16
        self.final_chunks: set[int] = set()  # those whose last backward pass of the step has begun
        # For each bucket, the number of parameters whose gradient is incomplete.
        self.num_incomplete = [len(bucket.flat_params) for bucket in buckets]
        self.reducing: dict[int, tuple[Tensor, list[Pending]]] = {}
        # Sharded buckets whose reduction started before the current unit.
        self.started_earlier: list[int] = []
        # Gradients that are partial sums over an axis.
        self.partial: dict[Axis, list[Tensor]] = collections.defaultdict(list)
        for bucket, shard in zip(buckets, memory.shards, strict=True):
            for param in bucket.flat_params:
                spec, begin = param.shard_spec, bucket.shard[0]
                for range_ in intersections(bucket.shard, param.flat(spec.shared)) if spec.partial else ():
                    self.partial[spec.replicas].append(shard[range_[0] - begin : range_[1] - begin])

    def begin_last_backward(self, chunk: int) -> None:
        """Called when the step's last backward pass through `chunk` begins, which completes its gradients."""
        if self.overlap:
            self.final_chunks.add(chunk)

    def prepare(self, indices: Iterable[int]) -> None:
        """Called before gradients of a unit are computed: give its sharded buckets zeroed memory."""
        for index in self.started_earlier:
            self._end_reduce(index)
        self.started_earlier = [index for index in self.reducing if self.memory.sharded[index]]
        for index in indices:
            if self.memory.sharded[index] and (index in self.reducing or not self.memory.has(index)):
                self._end_reduce(index)
                self.memory.allocate(index)
                self.memory.whole[index].zero_()

    def on_grad(self, index: int, chunk: int) -> bool:
        """Called when backward has accumulated the gradient of a parameter of bucket `index`.

        Returns:
            True if the bucket's reduction starts.
        """
        if not self.memory.sharded[index] and chunk not in self.final_chunks:
            return False
        self.num_incomplete[index] -= 1
        complete = self.num_incomplete[index] == 0
        if complete:
            self._start_reduce(index)
        return complete

    def end_backward(self, indices: Iterable[int]) -> None:
        """Called after each backward pass, with the buckets of its chunk: reduce sharded gradients of which some
        parameter got none."""
        for index in indices:
            if self.memory.sharded[index] and self.memory.has(index) and index not in self.reducing:
                self._start_reduce(index)

    def _start_reduce(self, index: int) -> None:
        """Start reducing a bucket's gradients over its reduce axis, or over the part of it that shards them.

        Reduce-scatter (one reduce per shard if shards differ in length) with the distributed optimizer, otherwise
        all-reduce. Gradients are summed, not averaged: each loss is already divided by the global denominator.
        """
        bucket = self.buckets[index]
        axis = bucket.group.reduce_axis if len(bucket.shards) == 1 else bucket.group.shard_axis
        grads = self.memory.whole[index]
        if self.in_bf16 and axis.size > 1 and not bucket.group.optimizer.counts:
            grads = grads.bfloat16()
            if self.memory.sharded[index]:
                self.memory.free(index)
        if len(bucket.shards) == 1:
            pending = [start_all_reduce(grads, axis)]
        elif bucket.is_even:
            pending = [start_reduce_scatter(grads, axis, out=bucket.cut(grads, bucket.shard))]
        else:
            shards = [bucket.cut(grads, shard) for shard in bucket.shards]
            pending = [start_reduce(x, rank, axis) for rank, x in enumerate(shards) if len(x)]
        self.reducing[index] = grads, pending
        if self.memory.sharded[index] and not self.overlap:
            self._end_reduce(index)

    def _end_reduce(self, index: int) -> None:
        """Wait for the reduction of a bucket, if it has started, and put the sum where the optimizer reads it."""
        if index not in self.reducing:
            return
        bucket, shard = self.buckets[index], self.memory.shards[index]
        grads, started = self.reducing.pop(index)
        for pending in started:
            pending.wait()
        summed = grads[slice(*(i - bucket.start for i in bucket.shard))]
        if self.memory.sharded[index]:
            shard.add_(summed)
            self.memory.free(index)
        elif grads.dtype != shard.dtype:
            shard.copy_(summed)
        self.num_incomplete[index] = len(bucket.flat_params)

    def finish(self) -> None:
        """Reduce the remaining buckets and wait, so that gradients of local shards are sums over the global batch."""
        for index in range(len(self.buckets)):
            if index not in self.reducing and self.memory.has(index):
                self._start_reduce(index)
        between: list[tuple[Tensor, Pending]] = []
        for index, bucket in enumerate(self.buckets):
            self._end_reduce(index)
            axis, shard = bucket.group.instance_axis, self.memory.shards[index]
            if axis.size > 1 and len(shard):
                between.append((shard, start_all_reduce(shard.bfloat16() if self.in_bf16 else shard, axis)))
        for shard, pending in between:
            shard.copy_(pending.wait())
        for index, bucket in enumerate(self.buckets):
            if bucket.tied:
                all_reduce_sum(self.memory.shards[index], self.mesh.embedding)
        self.final_chunks.clear()
        self.started_earlier.clear()
        self._sum_partial()

    def _sum_partial(self) -> None:
        """All-reduce the gradients of which each tensor-parallel rank has a partial sum."""
        for axis, parts in self.partial.items():
            if axis.size == 1:
                continue
            summed = all_reduce_sum(torch.cat(parts), axis)
            for part, values in zip(parts, summed.split([len(part) for part in parts]), strict=True):
                part.copy_(values)
