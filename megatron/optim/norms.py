"""Sums and norms over the whole model's gradients or weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron.optim.layout import Bucket
from megatron.parallel.collectives import all_reduce_sum
from megatron.parallel.mesh import Axis, Mesh

# Elements whose norm `flat_norm` computes in fp32.
CHUNK_SIZE = 1 << 10


def model_sum(
    shards: list[Tensor], buckets: list[Bucket], mesh: Mesh, measure: Callable[[Tensor], Tensor]
) -> Tensor:
    """Sum a measure over the whole model's elements, each once, without counts. Every rank must call this.

    Args:
        shards: fp32 tensors of the local shards, by bucket.
        measure: maps a flat tensor to a scalar.
    """
    return all_reduce_sum(stage_sum(shards, buckets, mesh, measure), mesh.pp)


def stage_sum(
    shards: list[Tensor], buckets: list[Bucket], mesh: Mesh, measure: Callable[[Tensor], Tensor]
) -> Tensor:
    """Sum a measure over the elements of this pipeline stage, as `model_sum` does."""
    total = torch.zeros((), device=mesh.device).double()
    found: dict[tuple[Axis, Axis], list[Tensor]] = {}
    for bucket, shard in zip(buckets, shards, strict=True):
        sums = found.setdefault((bucket.group.model_axis, bucket.group.shard_axis), [total])
        sums += [
            measure(shard[begin - bucket.shard[0] : end - bucket.shard[0]]).double()
            for begin, end in (() if bucket.group.optimizer.counts else bucket.counted)
        ]
    # Every rank of a stage has the same axes, but some stages may have no experts.
    stage = [all_reduce_sum(torch.stack(sums).sum(), *axes) for axes, sums in found.items()]
    return torch.stack(stage).sum()


def model_norm(shards: list[Tensor], buckets: list[Bucket], mesh: Mesh) -> Tensor:
    """L2 norm over the whole model, an fp32 scalar; arguments as in `model_sum`."""
    return model_sum(shards, buckets, mesh, flat_square).sqrt().float()


def flat_square(flat: Tensor) -> Tensor:
    """Sum of the squares of a flat fp32 tensor, an fp64 scalar."""
    return flat_norm(flat).square()


def flat_norm(flat: Tensor) -> Tensor:
    """L2 norm of a flat fp32 tensor, an fp64 scalar.

    Sums in fp32 are short: one of 65,536 squares is off by up to 6e-6, a long one on a CPU by several percent.
    """
    whole = flat.numel() // CHUNK_SIZE * CHUNK_SIZE
    if whole == 0:  # a bias or the weight of a norm
        return torch.linalg.vector_norm(flat).double()
    norms = torch.linalg.vector_norm(flat[:whole].view(-1, CHUNK_SIZE), dim=1)
    if whole < flat.numel():
        norms = torch.cat((norms, torch.linalg.vector_norm(flat[whole:]).unsqueeze(0)))
    return torch.linalg.vector_norm(norms.double())
