"""Ring attention in a calibration: its kernels are others than those of one process, and it joins their parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from megatron.context_parallel.attention import ContextAttention
from megatron.ops.attention import MaskSpec
from megatron.ops.backend import Ops
from megatron.parallel.mesh import ALONE, Axis
from megatron.planner.calibrate_model import make_job
from megatron.planner.cluster import Cluster
from megatron.planner.job import Job
from megatron.planner.kernels import Kernels
from megatron.planner.layout import Layout
from megatron.planner.programs import OURS

# Positions of a rank, hidden size and heads.
LENGTH, HIDDEN, HEADS = 128, 512, 8
# Steps of the fit, and the most that a ring's attention may be faster than that of one process.
FIT_STEPS, MAX_RATIO = 100, 20.0


def ring_job(processes: int) -> Job:
    """One layer over a sequence that the processes divide."""
    return make_job(1, HIDDEN, HEADS, LENGTH * processes)


def ring_attention(ops: Ops, dtype: torch.dtype, axis: Axis) -> Callable[[], object]:
    """Attention of one layer of `ring_job`, forward and backward, over all processes."""
    attention = ContextAttention(axis, ALONE, axis, gathers=False, inner=ops)
    device = torch.device("cpu")
    mask = attention.make_mask(MaskSpec(length=LENGTH * axis.size, device=device))

    def make(*, requires_grad: bool) -> Tensor:
        shape = (1, HEADS, LENGTH, HIDDEN // HEADS)
        return torch.randn(shape, dtype=dtype, requires_grad=requires_grad)

    q, k, v = (make(requires_grad=True) for _ in range(3))
    grad = make(requires_grad=False)

    def run() -> None:
        out = attention.attention(q, k, v, mask_bnst=mask, causal=True, dropout=0.0)
        torch.autograd.grad(out, (q, k, v), grad)

    return run


def ring_seconds(cluster: Cluster) -> float:
    """Predicted seconds of `ring_attention` of all devices of a cluster."""
    kernels = Kernels(ring_job(cluster.devices), Layout(context=cluster.devices), cluster, OURS)
    return kernels.attention.total + kernels.context_parallel.total


def with_ring(cluster: Cluster, seconds: float) -> Cluster:
    """Fit the speed of a ring's attention, given that of its communication, to the time of `ring_attention`."""
    for _ in range(FIT_STEPS):
        ratio = cluster.efficiency.context * ring_seconds(cluster) / seconds
        efficiency = dataclasses.replace(cluster.efficiency, context=min(ratio, MAX_RATIO))
        cluster = dataclasses.replace(cluster, efficiency=efficiency)
    return cluster
