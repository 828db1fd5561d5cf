"""Computing again in backward what forward did not keep, to save memory (arXiv 1604.06174, 2205.05198)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from megatron.parallel.collectives import all_gather, share
from megatron.parallel.config import ParallelConfig
from megatron.parallel.mesh import ALONE, Axis


@dataclasses.dataclass(frozen=True)
class Recompute:
    """What of a chunk of layers is computed again in backward.

    Attributes:
        granularity: None for nothing, "selective" for attention alone, "full" for whole layers.
        method: with "full", "uniform" keeps the input of every group of layers, "block" recomputes the first
            layers of the chunk, each by itself, and keeps everything of the others.
        num_layers: of a group, or of the block.
        axis: the processes that divide the kept inputs among them; of size 1 where each keeps them whole.
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
        """The layers of a chunk in groups that run as one, and whether their inside is computed again."""
        if self.granularity != "full":
            return [(range(layers), False)]
        if self.method == "uniform":
            starts = range(0, layers, self.num_layers)
            return [(range(start, min(start + self.num_layers, layers)), True) for start in starts]
        block = min(self.num_layers, layers)
        return [(range(i, i + 1), True) for i in range(block)] + [(range(block, layers), False)]


class _Rerun(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run: Callable[[Tensor], Tensor], x: Tensor, axis: Axis) -> Tensor:
        ctx.run, ctx.axis, ctx.shape = run, axis, x.shape
        # A copy, for a part that were a view would keep the whole in memory.
        ctx.save_for_backward(x if axis.size == 1 else share(x.flatten(), axis).clone())
        return run(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[None, Tensor, None]:
        (kept,) = ctx.saved_tensors
        x = kept if ctx.axis.size == 1 else all_gather(kept, ctx.axis).view(ctx.shape)
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            # Not the output itself, whose memory backward has no use for.
            end = get_gradient_edge(ctx.run(x))
        torch.autograd.backward(end, grad)
        return None, x.grad, None


def rerun(run: Callable[[Tensor], Tensor], x: Tensor, axis: Axis = ALONE) -> Tensor:
    """run(x), of which only `x` is kept, by each process of `axis` a part; the rest is computed again in backward.

    `run` must give the same every time: dropout in it is keyed (`random.dropout`).
    """
    return _Rerun.apply(run, x, axis) if torch.is_grad_enabled() else run(x)


def rerun_attention(run: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """run(*inputs), of which the inputs are kept and the rest is computed again in backward."""
    if not torch.is_grad_enabled():
        return run(*inputs)
    return checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False)
