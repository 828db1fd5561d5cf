"""Flat memory and shards for an optimizer that updates whole matrices."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from megatron.optim.layout import ALIGNMENT, Bucket, round_up
from megatron.optim.spec import Shard
from megatron.parallel.collectives import all_reduce_sum
from megatron.parallel.mesh import ALONE, Axis
from megatron.parallel.slices import Block, GlobalSlice, overlap


@dataclasses.dataclass(frozen=True)
class MatrixShard(Shard):
    """A matrix [rows, columns], or the part of it that this tensor-parallel rank holds.

    Attributes:
        shape: of the whole matrix, [outputs, inputs].
        tp: ranks that together hold the matrix. All of them take the step at the same time.
        blocks: the parts of the local tensor and their places in the whole matrix.
        counted: those of `blocks` that no other rank contributes to the whole matrix.
    """

    shape: tuple[int, ...]
    tp: Axis
    blocks: list[tuple[Block, Block]]
    counted: list[tuple[Block, Block]]

    def gather(self, x: Tensor) -> Tensor:
        """Assemble the whole matrix from the part `x` of each tensor-parallel rank."""
        if self.tp.size == 1:
            return x
        whole = x.new_zeros(self.shape)
        for local, place in self.counted:
            whole[place.index] = x[local.index]
        return all_reduce_sum(whole, self.tp)

    def local(self, whole: Tensor) -> Tensor:
        """Take this rank's part of a whole matrix."""
        if self.tp.size == 1:
            return whole
        return torch.cat([whole[place.index] for _, place in self.blocks])


def matrices_of(shard: Shard, bucket: Bucket, tp: Axis) -> list[MatrixShard]:
    """The matrices that the local shard of a bucket consists of, as views of its tensors."""
    found = []
    for param in bucket.flat_params:
        if overlap((param.start, param.end), bucket.shard) is None:
            continue
        spec, begin, end = param.shard_spec, param.start - bucket.shard[0], param.end - bucket.shard[0]
        blocks = list(spec.blocks())
        counted = [
            (both, both.translated(local, place))
            for rows in param.counted()
            for local, place in blocks
            if (both := local.intersect(Block(rows, (0, spec.row))))
        ]
        weight, grad, *state = (
            flat[begin:end].view(spec.local_shape)
            for flat in (shard.weight, shard.grad, *shard.state.values())
        )
        kept = dict(zip(shard.state, state, strict=True))
        if spec.matrices > 1:
            found += _divided(Shard(weight, grad, kept), spec)
            continue
        found.append(MatrixShard(weight, grad, kept, spec.shape, tp, blocks, counted))
    return found


def _divided(shard: Shard, spec: GlobalSlice) -> list[MatrixShard]:
    """The matrices of several experts, each of which this rank holds as a whole."""
    rows, columns = spec.shape[0] // spec.matrices, spec.row
    parts = [tensor.split(rows) for tensor in (shard.weight, shard.grad, *shard.state.values())]
    shape = (columns, rows) if spec.transposed else (rows, columns)
    return [
        MatrixShard(weight, grad, dict(zip(shard.state, state, strict=True)), shape, ALONE, [], [])
        for weight, grad, *state in zip(*parts, strict=True)
    ]


def cut_between_matrices(buckets: list[Bucket]) -> list[Bucket]:
    """Cut buckets between matrices, so that each rank gets about the same share of the optimizer's work.

    A bucket's matrices are sorted by the rank that updates them, and their ranges cut into shards there.
    """
    owners = _owners(buckets)
    return [_cut(bucket, owners) for bucket in buckets]


def _cut(bucket: Bucket, owners: dict[str, int]) -> Bucket:
    params, shards = [], []
    begin = end = bucket.start
    ranks = len(bucket.shards)
    for rank in range(ranks):
        for param in bucket.flat_params:
            if owners[param.name] == rank:
                params.append(dataclasses.replace(param, start=end))
                end += round_up(param.end - param.start, ALIGNMENT)
        shards.append((begin, end if rank < ranks - 1 else bucket.end))
        begin = end
    return dataclasses.replace(bucket, shards=tuple(shards), flat_params=tuple(params))


def _owners(buckets: list[Bucket]) -> dict[str, int]:
    """Assign each matrix to a rank of `shard_axis`.

    Matrices are assigned in descending order of cost, each to the rank with the least work so far. The cost is that of
    the product of a matrix with its transpose, rows x columns x min(rows, columns).

    Returns:
        Ranks by name of the parameter.
    """
    specs = {param.name: param.shard_spec for bucket in buckets for param in bucket.flat_params}
    costs = {
        name: spec.shape[0] * spec.row * min(spec.shape[0] // spec.matrices, spec.row)
        for name, spec in specs.items()
    }
    work = [0] * len(buckets[0].shards)
    owners: dict[str, int] = {}
    for name, cost in sorted(costs.items(), key=lambda item: -item[1]):
        owners[name] = work.index(min(work))
        work[owners[name]] += cost
    return owners
