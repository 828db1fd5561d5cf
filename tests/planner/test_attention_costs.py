"""The planner's accesses of memory around the kernels of ring attention, against those of the operations that run."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.context_parallel import attention as context_attention
from megatron.context_parallel.attention import ContextAttention
from megatron.ops.attention import MaskSpec
from megatron.ops.backend import PLAIN
from megatron.parallel.collectives import Pending
from megatron.parallel.mesh import ALONE, Axis
from megatron.planner.attention_costs import AttentionCosts
from megatron.planner.calibrate_model import make_job
from megatron.planner.cluster import DATA_SHEET_EFFICIENCY, Cluster, Device, Link
from megatron.planner.layout import Layout
from megatron.planner.programs import OURS

LENGTH, HIDDEN, HEADS = 512, 256, 4
# Operations that are not counted: views, and attention itself.
FREE = (
    *("view", "split", "transpose", "permute", "slice", "select", "unsqueeze", "unbind", "expand"),
    *("detach", "alias"),
)
KERNELS = ("flash_attention",)
REPLACED = ("copy_", "zero_", "fill_", "zeros", "full", "new_zeros", "new_full", "zeros_like")


class Accesses(TorchDispatchMode):
    """Counts bytes that operations read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::").lstrip("_")
        if any(name.startswith(free) for free in FREE) or any(kernel in name for kernel in KERNELS):
            return out
        if "empty" in name:
            return out
        read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if name in REPLACED:  # not what stood there before
            read = read[1:]
        written = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.bytes += sum(x.numel() * x.element_size() for x in read + written)
        return out


def counted(gathers: bool, ranks: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> float:
    """Bytes of all ranks' forward and backward passes of attention, each alone: what it receives is what it sends."""
    monkeypatch.setattr(context_attention, "start_shift", lambda x, _: Pending(x))
    gathered: dict[int, Tensor] = {}

    def all_gather(x: Tensor, axis: Axis) -> Tensor:
        return gathered.setdefault(axis.rank, x.expand(axis.size, *x.shape[1:]))

    monkeypatch.setattr(context_attention, "all_gather", all_gather)
    monkeypatch.setattr(context_attention, "start_reduce_scatter", lambda x, axis: Pending(x[:1]))
    shape = 1, LENGTH // ranks, HEADS, HIDDEN // HEADS
    total = 0.0
    for rank in range(ranks):
        ring = Axis(rank, ranks)
        attention = ContextAttention(ring, ALONE, ring, gathers=gathers, inner=PLAIN)
        mask = attention.make_mask(MaskSpec(length=LENGTH, device=torch.device("cpu")))
        q, k, v, grad = (torch.randn(shape, dtype=dtype).transpose(1, 2) for _ in range(4))
        inputs = [x.requires_grad_() for x in (q, k, v)]
        with Accesses() as accesses:
            out = attention.attention(*inputs, mask_bnst=mask, causal=True, dropout=0.0)
            torch.autograd.grad(out, inputs, grad)
        total += accesses.bytes
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("exchange", ["p2p", "all_gather"])
def test_copies_and_sums_of_ring_attention(
    exchange: str, ranks: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 10%: what is done to a number for each query and head is not counted, and a first part may be smaller."""
    bandwidth = 1e10
    efficiency = dataclasses.replace(DATA_SHEET_EFFICIENCY, memory=1.0)
    precision = "fp32" if dtype == torch.float32 else "bf16"
    device, link = Device("cpu", precision, 1e11, 1, 8e9, bandwidth), Link(1e9, 1e-5)
    cluster = Cluster(device, ranks, ranks, link, link, efficiency)
    layout = Layout(context=ranks, context_exchange=exchange)
    costs = AttentionCosts(make_job(1, HIDDEN, HEADS, LENGTH), layout, cluster, OURS)
    both = costs.context_parallel
    predicted = ranks * bandwidth * (both.forward.elementwise + both.backward.elementwise)
    assert predicted == pytest.approx(counted(exchange == "all_gather", ranks, dtype, monkeypatch), rel=0.1)
