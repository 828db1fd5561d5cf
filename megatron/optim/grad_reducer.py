"""Reduction of gradients over the data-parallel group, bucket by bucket."""

from __future__ import annotations

import collections

import torch
from torch import Tensor

from megatron.optim.layout import Bucket
from megatron.parallel.collectives import (
    Pending,
    all_reduce_sum,
    start_all_reduce,
    start_reduce,
    start_reduce_scatter,
)
from megatron.parallel.config import ParallelConfig
from megatron.parallel.mesh import Axis, Mesh
from megatron.parallel.slices import Range, intersections


class GradReducer:
    """Reduces gradients. With --overlap-grad-reduce, starts on each bucket as soon as its gradients are complete.

    Attributes:
        reducing: by bucket index, the gradients being reduced and their pending communication.
    """

    def __init__(self, grads: Tensor, buckets: list[Bucket], mesh: Mesh, config: ParallelConfig) -> None:
        """`grads` is the flat fp32 gradient memory."""
        self.grads, self.buckets, self.mesh = grads, buckets, mesh
        self.overlap, self.in_bf16 = config.overlap_grad_reduce, config.grad_reduce_in_bf16
        self.final_chunks: set[int] = set()  # those whose last backward pass of the step has begun
        # For each bucket, the number of parameters whose gradient is incomplete.
        self.num_incomplete = [len(bucket.flat_params) for bucket in buckets]
        self.reducing: dict[int, tuple[Tensor, list[Pending]]] = {}
        # Ranges of gradients that are partial sums over an axis.
        self.partial: dict[Axis, list[Range]] = collections.defaultdict(list)
        for bucket in buckets:
            for param in bucket.flat_params:
                spec = param.shard_spec
                if spec.partial:
                    self.partial[spec.replicas] += intersections(bucket.shard, param.flat(spec.shared))

    def begin_last_backward(self, chunk: int) -> None:
        """Called when the step's last backward pass through `chunk` begins, which completes its gradients."""
        if self.overlap:
            self.final_chunks.add(chunk)

    def on_grad(self, index: int, chunk: int) -> None:
        """Called when backward has accumulated the gradient of a parameter of bucket `index`."""
        if chunk in self.final_chunks:
            self.num_incomplete[index] -= 1
            if self.num_incomplete[index] == 0:
                self._start_reduce(index)

    def _start_reduce(self, index: int) -> None:
        """Start reducing a bucket's gradients over its reduce axis.

        Reduce-scatter (one reduce per shard if shards differ in length) with the distributed optimizer, otherwise
        all-reduce. Gradients are summed, not averaged: each loss is already divided by the global denominator.
        """
        bucket = self.buckets[index]
        axis = bucket.group.reduce_axis
        grads = self.grads[bucket.start : bucket.end]
        if self.in_bf16 and axis.size > 1 and not bucket.group.optimizer.counts:
            grads = grads.bfloat16()
        shards = [grads[begin - bucket.start : end - bucket.start] for begin, end in bucket.shards]
        if len(shards) == 1:
            pending = [start_all_reduce(grads, axis)]
        elif bucket.is_even:
            pending = [start_reduce_scatter(grads, axis, out=shards[axis.rank])]
        else:
            pending = [start_reduce(x, rank, axis) for rank, x in enumerate(shards) if len(x)]
        self.reducing[index] = grads, pending

    def finish(self) -> None:
        """Reduce the remaining buckets and wait, so that gradients of local shards are sums over the global batch."""
        for index in range(len(self.buckets)):
            if index not in self.reducing:
                self._start_reduce(index)
        for index, bucket in enumerate(self.buckets):
            grads, started = self.reducing.pop(index)
            for pending in started:
                pending.wait()
            if grads.dtype != self.grads.dtype:
                begin, end = bucket.shard
                self.grads[begin:end] = grads[begin - bucket.start : end - bucket.start]
            self.num_incomplete[index] = len(bucket.flat_params)
            if bucket.tied:
                all_reduce_sum(self.grads[slice(*bucket.shard)], self.mesh.embedding)
        self.final_chunks.clear()
        self._sum_partial()

    def _sum_partial(self) -> None:
        """All-reduce the gradients of which each tensor-parallel rank has a partial sum."""
        for axis, ranges in self.partial.items():
            if axis.size == 1 or not ranges:
                continue
            parts = [self.grads[slice(*range_)] for range_ in ranges]
            summed = all_reduce_sum(torch.cat(parts), axis)
            for part, values in zip(parts, summed.split([len(part) for part in parts]), strict=True):
                part.copy_(values)
