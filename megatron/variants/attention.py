"""Variants of attention.

Shapes in names: b batch, n heads of this rank, s queries, t keys, d head width.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from megatron.errors import InputError
from megatron.model.config import ModelConfig
from megatron.model.context import ModelContext
from megatron.model.transformer import LayerInputs, Norm, SelfAttention, Transformer, TransformerLayer
from megatron.model.variants import variant
from megatron.ops.attention import causal_mask
from megatron.ops.document_attention import dense_mask
from megatron.parallel.collectives import all_reduce_sum
from megatron.parallel.mesh import Axis
from megatron.parallel.parameters import ones, parameter
from megatron.parallel.slices import GlobalSlice, whole
from megatron.parallel.stages import Chunk


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
    """RMSNorm over all heads together, which tensor parallelism splits over its ranks."""

    def __init__(self, shard: GlobalSlice, epsilon: float, context: ModelContext) -> None:
        """`shard`: shard spec of the scale [heads · d]."""
        super().__init__()
        self.weight = parameter(shard, ones)
        self.width, self.epsilon, self.copies = shard.shape[0], epsilon, shard.replicas.size
        self.tp, self.ops = context.tp, context.ops

    def forward(self, x_bnsd: Tensor) -> Tensor:
        arguments = x_bnsd, self.weight, self.epsilon, self.width, self.tp, self.copies
        if self.tp.size == 1:
            return _HeadsNorm.apply(*arguments)
        return self.ops.communicate(_HeadsNorm.apply, *arguments)


class QKNormAttention(SelfAttention):
    """Attention that normalizes its queries and keys (arXiv 2010.04245), before RoPE.

    It takes each head alone, or all heads together as OLMo 2 (arXiv 2501.00656).
    """

    def __init__(self, config: ModelConfig, layer: int, context: ModelContext) -> None:
        super().__init__(config, layer, context)
        self.q_layernorm: nn.Module
        self.k_layernorm: nn.Module
        if not (config.qk_layernorm or config.qk_layernorm_all_heads):  # for subclasses
            self.q_layernorm, self.k_layernorm = nn.Identity(), nn.Identity()
        elif config.qk_layernorm_all_heads:
            self.q_layernorm, self.k_layernorm = self.all_heads_norms(config)
        else:
            # All heads share one scale, and each rank normalizes some of the heads.
            shard = whole(config.kv_channels, replicas=context.tp, partial=True)
            self.q_layernorm = variant(Norm, config)(config, context, shard)
            self.k_layernorm = variant(Norm, config)(config, context, shard)

    def split_heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q_bnsd, k_bgsd, v_bgsd = super().split_heads(qkv)
        return self.q_layernorm(q_bnsd), self.k_layernorm(k_bgsd), v_bgsd

    def all_heads_norms(self, config: ModelConfig) -> tuple[HeadsNorm, HeadsNorm]:
        """The norms of the queries and of the keys, each over all heads."""
        if not config.qk_layernorm or config.normalization != "RMSNorm":
            raise InputError(
                "--qk-layernorm-all-heads needs --qk-layernorm and --normalization RMSNorm; add them"
            )
        if config.apply_layernorm_1p:
            raise InputError(
                "--apply-layernorm-1p and --qk-layernorm-all-heads exclude each other; leave one of them out"
            )
        d, tp, kv = config.kv_channels, self.context.tp, self.context.kv
        queries, keys = config.num_attention_heads * d, config.num_query_groups * d
        q_shard = GlobalSlice((queries,), 0, (tp.local_range(queries),))
        if config.num_query_groups >= tp.size:
            k_shard = GlobalSlice((keys,), 0, (tp.local_range(keys),))
        else:  # the ranks of `kv` hold the same key head, and each has the gradient of its own queries
            begin = tp.rank // kv.size * d
            k_shard = GlobalSlice(
                (keys,), 0, ((begin, begin + d),), shared=((0, d),), replicas=kv, partial=True
            )
        epsilon, context = config.norm_epsilon, self.context
        return HeadsNorm(q_shard, epsilon, context), HeadsNorm(k_shard, epsilon, context)


class AlibiTransformer(Transformer):
    """Layers whose attention has a bias against distant keys in place of position embeddings (ALiBi, arXiv 2108.12409).

    One bias serves all layers, in the place of their mask.
    """

    def __init__(self, config: ModelConfig, context: ModelContext, chunk: Chunk) -> None:
        super().__init__(config, context, chunk)
        self.context, self.heads = context, config.num_attention_heads

    def forward(self, x_sbh: Tensor, inputs: LayerInputs) -> Tensor:
        if not self.layers:
            return super().forward(x_sbh, inputs)
        tp, mask_bnst, cache = self.context.tp, inputs.mask_bnst, inputs.cache
        slopes_n = alibi_slopes(self.heads, x_sbh.device)[slice(*tp.local_range(self.heads))]
        if self.context.cp.size > 1:  # the keys are on other ranks
            assert inputs.mask_spec is not None
            spec = dataclasses.replace(inputs.mask_spec, slopes_n=slopes_n)
            mask = self.context.ops.make_mask(spec)
            return super().forward(x_sbh, dataclasses.replace(inputs, mask_bnst=mask))
        if isinstance(mask_bnst, BlockMask):
            mask_bnst = dense_mask(mask_bnst)
        elif mask_bnst is not None and not isinstance(mask_bnst, Tensor):  # `DocumentMask`
            mask_bnst = mask_bnst.dense()
        if mask_bnst is None:
            s = x_sbh.shape[0] * (tp.size if self.context.sequence_parallel else 1)
            t = s if cache is None else cache.memory.shape[-2]
            mask_bnst = causal_mask(s, t, x_sbh.device).unsqueeze(1)
        layer = next(iter(self.layers.values()))
        assert isinstance(layer, TransformerLayer)
        dtype = layer.dtype if cache is None else cache.memory.dtype  # that of the queries
        bias_bnst = alibi_bias(slopes_n.view(-1, 1, 1), mask_bnst).to(dtype)
        return super().forward(x_sbh, dataclasses.replace(inputs, mask_bnst=bias_bnst))


def alibi_slopes(heads: int, device: torch.device) -> Tensor:
    """The bias of each head for a step back, [n].

    For a power of two p these are 2^(-8/p), 2^(-16/p), ... Other numbers of heads add every second slope of 2p heads.
    """
    p = 1 << (heads.bit_length() - 1)
    i = torch.arange(heads, device=device)
    return torch.exp2(-torch.where(i < p, 8 * (i + 1), 8 * (i - p) + 4) / p)


def alibi_bias(slopes_n11: Tensor, mask_b1st: Tensor) -> Tensor:
    """Each slope times the position of the key relative to the query, the last key that the mask allows; -inf where it
    allows none. [b, n, s, t] in fp32."""
    keys_t = torch.arange(mask_b1st.shape[-1], device=mask_b1st.device)
    queries_b1s1 = (mask_b1st * keys_t).amax(-1, keepdim=True)
    return (slopes_n11 * (keys_t - queries_b1s1)).masked_fill(~mask_b1st, -torch.inf)


# By the flag that chooses them, as in `megatron.model.variants.VARIANTS`.
VARIANTS: dict[str, dict[type, type]] = {
    "qk_layernorm": {SelfAttention: QKNormAttention},
    "qk_layernorm_all_heads": {SelfAttention: QKNormAttention},
    "position_embedding_type": {Transformer: AlibiTransformer},
}
