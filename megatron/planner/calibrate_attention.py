"""Attention in a calibration: the kernels of one rank, and those of context parallelism, which are others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from megatron.context_parallel.kernels import partial_attention, partial_attention_backward
from megatron.ops.backend import Ops
from megatron.planner.calibrate_model import make_job
from megatron.planner.cluster import Cluster
from megatron.planner.job import Job
from megatron.planner.kernels import Kernels
from megatron.planner.layout import Layout
from megatron.planner.programs import OURS

# Positions of a rank, hidden size and heads.
LENGTH, HIDDEN, HEADS = 128, 512, 8
MAX_RATIO = 20.0  # of the speeds of these kernels and of those of one rank


def attention_kernels(job: Job, ops: Ops, dtype: torch.dtype) -> Callable[[], object]:
    """Attention of one layer, forward and backward."""
    model = job.model
    shape = (1, model.num_attention_heads, job.seq_length, model.kv_channels)
    q, k, v = (torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3))
    grad = torch.randn(shape, dtype=dtype)

    def run() -> None:
        out = ops.attention(q, k, v, mask_bnst=None, causal=True, dropout=0.0)
        torch.autograd.grad(out, (q, k, v), grad)

    return run


def attention_seconds(job: Job, cluster: Cluster) -> float:
    """Predicted seconds of `attention_kernels`."""
    return Kernels(job, Layout(), cluster, OURS).attention.total


def ring_job(processes: int) -> Job:
    """One layer over a sequence that the processes divide."""
    return make_job(1, HIDDEN, HEADS, LENGTH * processes)


def ring_kernels(dtype: torch.dtype, processes: int) -> Callable[[], object]:
    """Attention of a rank in one layer of `ring_job`, forward and backward, without communication.

    Its queries meet its own keys up to their position, and half of them all keys of each other rank.
    """
    shape = (1, HEADS, LENGTH, HIDDEN // HEADS)
    q, k, v, grad = (torch.randn(shape, dtype=dtype) for _ in range(4))
    blocks = [(0, True)] + [(LENGTH // 2, False)] * (processes - 1)

    def run() -> None:
        for begin, causal in blocks:
            queries, grads = q[:, :, begin:], grad[:, :, begin:]
            out, lse = partial_attention(queries, k, v, None, causal=causal)
            partial_attention_backward(grads, queries, k, v, out, lse, None, causal=causal)

    return run


def ring_seconds(cluster: Cluster) -> float:
    """Predicted seconds of `ring_kernels` for all devices of a cluster."""
    return Kernels(ring_job(cluster.devices), Layout(context=cluster.devices), cluster, OURS).attention.total


def with_ring(cluster: Cluster, seconds: float) -> Cluster:
    """Fit the speed of these kernels to the time of `ring_kernels`."""
    launches = 2 * cluster.efficiency.launch
    ratio = (ring_seconds(cluster) - launches) / max(seconds - launches, 1e-9)
    context = min(max(ratio * cluster.efficiency.context, 1 / MAX_RATIO), MAX_RATIO)
    return dataclasses.replace(cluster, efficiency=dataclasses.replace(cluster.efficiency, context=context))
