"""Activation recomputation (gradient checkpointing; arXiv 1604.06174, 2205.05198)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from megatron.parallel.collectives import all_gather, local_shard
from megatron.parallel.config import ParallelConfig
from megatron.parallel.mesh import ALONE, Axis


@dataclasses.dataclass(frozen=True)
class Recompute:
    """Activations of a chunk of layers that backward recomputes.

    Attributes:
        granularity: None for none, "selective" for attention only, "full" for whole layers.
        method: with "full", "uniform" saves the input of each group of layers; "block" recomputes the first layers of
            the chunk, one by one, and saves all activations of the others.
        num_layers: layers of a group, or of the block.
        axis: ranks that the saved inputs are split over; of size 1 if each rank saves them whole.
    """

    granularity: str | None = None
    method: str | None = None
    num_layers: int = 1
    axis: Axis = ALONE

    @classmethod
    def from_config(cls, config: ParallelConfig, tp: Axis) -> Recompute:
        return cls(
            config.recompute_granularity,
            config.recompute_method,
            config.recompute_num_layers or 1,
            tp if config.distribute_saved_activations else ALONE,
        )

    def groups(self, layers: int) -> list[tuple[range, bool]]:
        """The layers of a chunk in groups that run as one, with true for those that are recomputed."""
        if self.granularity != "full":
            return [(range(layers), False)]
        if self.method == "uniform":
            starts = range(0, layers, self.num_layers)
            return [(range(start, min(start + self.num_layers, layers)), True) for start in starts]
        block = min(self.num_layers, layers)
        return [(range(i, i + 1), True) for i in range(block)] + [(range(block, layers), False)]


NO_RECOMPUTE = Recompute()


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Tensor], x: Tensor, axis: Axis) -> Tensor:
        ctx.run, ctx.axis, ctx.shape = run, axis, x.shape
        # A copy, since a view would keep the whole input in memory.
        ctx.save_for_backward(x if axis.size == 1 else local_shard(x.flatten(), axis).clone())
        return run(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, None]:
        (saved,) = ctx.saved_tensors
        x = saved if ctx.axis.size == 1 else all_gather(saved, ctx.axis).view(ctx.shape)
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            # The edge, not the output, whose memory backward does not need.
            end = get_gradient_edge(ctx.run(x))
        torch.autograd.backward(end, grad)
        return None, x.grad, None


def recompute(run: Callable[[Tensor], Tensor], x: Tensor, axis: Axis = ALONE) -> Tensor:
    """run(x), which saves only `x`, split over `axis`; backward calls `run` again.

    `run` must be deterministic: its dropout is keyed (`random.dropout`).
    """
    return _Recompute.apply(run, x, axis) if torch.is_grad_enabled() else run(x)


def recompute_attention(run: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """run(*inputs), which saves only the inputs; backward calls `run` again."""
    if not torch.is_grad_enabled():
        return run(*inputs)
    return checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False)
