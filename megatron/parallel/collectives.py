"""Collectives over an axis of the mesh; over an axis of size 1 each does nothing."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron.parallel.mesh import Axis


def all_reduce_sum(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Replace `x`, any shape, by its sum over the processes of `axis`, in place."""
    if axis.size > 1:
        dist.all_reduce(x, dist.ReduceOp.SUM, group=axis.group)
    return x


def all_reduce_max(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Replace `x`, any shape, by its maximum over the processes of `axis`, in place."""
    if axis.size > 1:
        dist.all_reduce(x, dist.ReduceOp.MAX, group=axis.group)
    return x


def all_equal(value: int, axis: Axis) -> bool:
    """Whether the processes of `axis` came with the same value, of less than 63 bits."""
    largest, smallest = all_reduce_max(torch.tensor([value, -value]), axis).tolist()
    return largest == -smallest


def barrier(axis: Axis) -> None:
    """Wait until every process of `axis` has come here."""
    all_reduce_sum(torch.zeros(1), axis)
