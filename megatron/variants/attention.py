"""Variants of attention.

Shapes in names: b batch, n heads of this rank, s sequence, d head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron.errors import InputError
from megatron.model.config import ModelConfig
from megatron.model.context import ModelContext
from megatron.model.transformer import SelfAttention
from megatron.parallel.collectives import all_reduce_sum
from megatron.parallel.mesh import Axis
from megatron.parallel.parameters import ones, parameter
from megatron.parallel.slices import GlobalSlice


class _HeadsNorm(torch.autograd.Function):
    """x r w with r = 1 / √(mean(x²) + ε), the mean over all heads of the ranks of `tp`.

    `copies` ranks hold the same heads, and each of them has a partial sum of their gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, x_bnsd: Tensor, weight: Tensor, epsilon: float, width: int, tp: Axis, copies: int
    ) -> Tensor:
        x, w_n1d = x_bnsd.float(), weight.float().view(x_bnsd.shape[1], 1, -1)
        squares_b1s1 = all_reduce_sum(x.square().sum((1, 3), keepdim=True), tp) / copies
        r_b1s1 = (squares_b1s1 / width + epsilon).rsqrt()
        ctx.width, ctx.tp, ctx.copies = width, tp, copies
        ctx.save_for_backward(x_bnsd, weight, r_b1s1)
        return (x * r_b1s1 * w_n1d).to(x_bnsd.dtype)

    @staticmethod
    def backward(ctx: Any, grad_bnsd: Tensor) -> tuple[Tensor | None, ...]:
        x_bnsd, weight, r_b1s1 = ctx.saved_tensors
        x, grad, w_n1d = x_bnsd.float(), grad_bnsd.float(), weight.float().view(x_bnsd.shape[1], 1, -1)
        products_b1s1 = all_reduce_sum((grad * w_n1d * x).sum((1, 3), keepdim=True), ctx.tp) / ctx.copies
        grad_x = grad * w_n1d * r_b1s1 - x * (r_b1s1**3 * products_b1s1 / ctx.width)
        grad_weight = (grad * x * r_b1s1).sum((0, 2)).flatten()
        return grad_x.to(x_bnsd.dtype), grad_weight.to(weight.dtype), None, None, None, None


class HeadsNorm(nn.Module):
    """RMSNorm over all heads together, which tensor parallelism splits over the ranks of `tp`."""

    def __init__(self, shard: GlobalSlice, epsilon: float, tp: Axis) -> None:
        """`shard`: shard spec of the scale [heads · d]."""
        super().__init__()
        self.weight = parameter(shard, ones)
        self.width, self.epsilon, self.tp, self.copies = shard.shape[0], epsilon, tp, shard.replicas.size

    def forward(self, x_bnsd: Tensor) -> Tensor:
        return _HeadsNorm.apply(x_bnsd, self.weight, self.epsilon, self.width, self.tp, self.copies)


class AllHeadsNormAttention(SelfAttention):
    """Attention that normalizes the queries of all heads together, and so the keys (OLMo 2, arXiv 2501.00656)."""

    def __init__(self, config: ModelConfig, layer: int, context: ModelContext) -> None:
        super().__init__(config, layer, context)
        if not config.qk_layernorm or config.normalization != "RMSNorm":
            raise InputError(
                "--qk-layernorm-all-heads needs --qk-layernorm and --normalization RMSNorm; add them"
            )
        d, tp, kv = config.kv_channels, context.tp, context.kv
        queries, keys = config.num_attention_heads * d, config.num_query_groups * d
        q_shard = GlobalSlice((queries,), 0, (tp.local_range(queries),))
        if config.num_query_groups >= tp.size:
            k_shard = GlobalSlice((keys,), 0, (tp.local_range(keys),))
        else:  # the ranks of `kv` hold the same key head, and each has the gradient of its own queries
            begin = tp.rank // kv.size * d
            k_shard = GlobalSlice(
                (keys,), 0, ((begin, begin + d),), shared=((0, d),), replicas=kv, partial=True
            )
        self.q_layernorm = HeadsNorm(q_shard, config.norm_epsilon, tp)
        self.k_layernorm = HeadsNorm(k_shard, config.norm_epsilon, tp)
