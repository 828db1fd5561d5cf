"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434 section 2.1).

Keys and values are projections of a latent of c channels, and all heads share the part of the key that RoPE rotates.

Shapes in names: s sequence, b batch, h hidden, n heads of this rank, t keys, d width of query and key heads, of which
RoPE rotates the last r channels and not the first p, w width of value heads, e = c + r.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import torch
from torch import Tensor, nn

from megatron.model.config import ModelConfig
from megatron.model.context import ModelContext
from megatron.model.layers import ColumnParallelLinear, RowParallelLinear
from megatron.model.transformer import LayerInputs, Norm, SelfAttention, output_init
from megatron.model.variants import variant
from megatron.parallel.collectives import all_gather, start_all_reduce, start_reduce_scatter
from megatron.parallel.mesh import ALONE, Axis
from megatron.parallel.parameters import normal, xavier_uniform
from megatron.parallel.recompute import recompute_attention
from megatron.parallel.slices import GlobalSlice
from megatron.variants.rope_scaling import yarn_mscale


class _ToHeads(torch.autograd.Function):
    """Give [s, b, ...] whole to the heads of every rank of `tp`; with sequence parallelism a rank has a part of s.

    Each rank computes the gradient through its own heads, so backward sums it over the ranks.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Axis, sequence_parallel: bool) -> Tensor:
        ctx.tp, ctx.sequence_parallel = tp, sequence_parallel
        return all_gather(x, tp) if sequence_parallel else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.sequence_parallel:
            return start_reduce_scatter(grad, ctx.tp).wait(), None, None
        # A copy, since the sum replaces it and autograd may use the gradient elsewhere.
        return start_all_reduce(grad.clone(memory_format=torch.contiguous_format), ctx.tp).wait(), None, None


class LatentAttention(SelfAttention):
    """Self-attention with latents. Parameters are named and laid out as in Megatron core, and as DeepSeek's.

    Tensor parallelism splits the projections from the latents by heads. Every rank holds the projections to the
    latents whole, and the norms of the latents, which exist with --qk-layernorm.
    """

    def __init__(self, config: ModelConfig, layer: int, context: ModelContext) -> None:
        super().__init__(config, layer, context)
        del self.linear_qkv, self.linear_proj  # others take their place
        h, heads, c = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
        self.heads = heads // context.tp.size
        self.latent_widths = c, config.qk_pos_emb_head_dim
        self.query_widths = config.qk_head_dim, config.qk_pos_emb_head_dim
        self.key_value_widths = config.qk_head_dim, config.v_head_dim
        # Part of the softmax's scale with YaRN, as in DeepSeek-V3.
        self.query_scale = yarn_mscale(config.rope_scaling_factor, config.mscale_all_dim) ** 2
        # For layers that do not communicate: each rank holds them whole, or gets their input whole.
        alone = dataclasses.replace(context, tp=ALONE, kv=ALONE, sequence_parallel=False)

        def linear(
            inputs: int, outputs: int, context: ModelContext, shard: GlobalSlice | None = None
        ) -> ColumnParallelLinear:
            xavier = config.init_method_xavier_uniform
            init = xavier_uniform(inputs, outputs) if xavier else normal(config.init_method_std)
            return ColumnParallelLinear(inputs, outputs, bias=False, init=init, context=context, shard=shard)

        def to_latent(outputs: int) -> ColumnParallelLinear:
            return linear(h, outputs, alone, context.replicated(outputs, h))

        def norm(width: int) -> nn.Module:
            if not config.qk_layernorm:
                return nn.Identity()
            return variant(Norm, config)(config, context, context.replicated(width))

        self.linear_q_proj: nn.Module | None = None
        queries, keys_values = heads * config.kv_channels, heads * sum(self.key_value_widths)
        if config.q_lora_rank is None:
            self.linear_q_proj = linear(h, queries, context)
        else:
            self.linear_q_down_proj = to_latent(config.q_lora_rank)
            self.q_layernorm = norm(config.q_lora_rank)
            self.linear_q_up_proj = linear(config.q_lora_rank, queries, context)
        self.linear_kv_down_proj = to_latent(c + config.qk_pos_emb_head_dim)
        self.kv_layernorm = norm(c)
        by_heads = GlobalSlice((keys_values, c), 0, (context.tp.local_range(keys_values),))
        self.linear_kv_up_proj = linear(c, keys_values, alone, by_heads)
        self.linear_proj = RowParallelLinear(
            heads * config.v_head_dim,
            h,
            bias=config.add_bias_linear,
            init=output_init(config),
            context=context,
        )

    def forward(self, x_sbh: Tensor, inputs: LayerInputs) -> Tensor:
        q_bnsp, q_bnsr = self.queries(x_sbh, inputs)
        latent_sbc, key_b1sr = self.latent_and_key(x_sbh, inputs)
        if inputs.cache is None:
            out_bnsw = self.attend(q_bnsp, q_bnsr, latent_sbc, key_b1sr, inputs)
        else:
            new_b1se = torch.cat((latent_sbc.transpose(0, 1).unsqueeze(1), key_b1sr), dim=-1)
            (cached_b1te,) = inputs.cache.extend(self.layer, new_b1se)
            if q_bnsp.shape[2] == 1:
                out_bnsw = self.attend_to_latents(q_bnsp, q_bnsr, cached_b1te, inputs)
            else:
                latent_b1tc, key_b1tr = cached_b1te.to(x_sbh.dtype).split(self.latent_widths, dim=-1)
                latent_tbc = latent_b1tc.squeeze(1).transpose(0, 1)
                out_bnsw = self.attend(q_bnsp, q_bnsr, latent_tbc, key_b1tr, inputs)
        return self.linear_proj(out_bnsw.permute(2, 0, 1, 3).flatten(2).to(x_sbh.dtype))

    def queries(self, x_sbh: Tensor, inputs: LayerInputs) -> tuple[Tensor, Tensor]:
        """The two parts of the queries, [b, n, s, p] and, rotated, [b, n, s, r]."""
        if self.linear_q_proj is not None:
            q = self.linear_q_proj(x_sbh)
        else:
            q = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(x_sbh)))
        if self.query_scale != 1:
            q = q * self.query_scale
        by_head = q.view(*q.shape[:2], self.heads, -1).permute(1, 2, 0, 3)
        q_bnsp, q_bnsr = by_head.split(self.query_widths, dim=-1)
        return q_bnsp, self.rotated(q_bnsr, inputs)

    def latent_and_key(self, x_sbh: Tensor, inputs: LayerInputs) -> tuple[Tensor, Tensor]:
        """The latent of keys and values, [s, b, c], and the part of the key that all heads share, [b, 1, s, r]."""
        tp, ops = self.context.tp, self.context.ops
        latent, key = self.linear_kv_down_proj(x_sbh).split(self.latent_widths, dim=-1)
        latent = self.kv_layernorm(latent)
        if tp.size > 1:
            both = torch.cat((latent, key), dim=-1)
            both = ops.communicate(_ToHeads.apply, both, tp, self.context.sequence_parallel)
            latent, key = both.split(self.latent_widths, dim=-1)
        return latent, self.rotated(key.transpose(0, 1).unsqueeze(1), inputs)

    def rotated(self, x_bnsr: Tensor, inputs: LayerInputs) -> Tensor:
        """Apply RoPE to each pair of adjacent channels. The result has the first channels of the pairs, then the
        second ones; the order does not matter for scores."""
        assert inputs.rotary is not None
        halves_bnsr = x_bnsr.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return self.context.ops.apply_rotary_emb(halves_bnsr, *inputs.rotary)

    def attend(
        self, q_bnsp: Tensor, q_bnsr: Tensor, latent_tbc: Tensor, key_b1tr: Tensor, inputs: LayerInputs
    ) -> Tensor:
        """Attention with the keys and values of each head, [b, n, s, w]."""
        kv = self.linear_kv_up_proj(latent_tbc)
        by_head = kv.view(*kv.shape[:2], self.heads, -1).permute(1, 2, 0, 3)
        k_bntp, v_bntw = by_head.split(self.key_value_widths, dim=-1)
        q_bnsd = torch.cat((q_bnsp, q_bnsr), dim=-1)
        k_bntd = torch.cat((k_bntp, key_b1tr.expand(-1, self.heads, -1, -1)), dim=-1)
        attention = functools.partial(self.attention, inputs=inputs)
        if self.recompute:
            return recompute_attention(attention, q_bnsd, k_bntd, v_bntw)
        return attention(q_bnsd, k_bntd, v_bntw)

    def attend_to_latents(
        self, q_bnsp: Tensor, q_bnsr: Tensor, cached_b1te: Tensor, inputs: LayerInputs
    ) -> Tensor:
        """`attend` for a single token, s = 1, with the latents, and the shared key after them, as keys and values.

        The projection to keys is applied to the queries instead, and that to values to the weighted sums (section 2.1.2
        of the paper). The heads are queries of one head, at the same position.
        """
        by_head = self.linear_kv_up_proj.weight.unflatten(0, (self.heads, -1))
        key_npc, value_nwc = by_head.split(self.key_value_widths, dim=1)
        q_bnse = torch.cat((q_bnsp @ key_npc, q_bnsr), dim=-1)
        # Attention divides by the root of this width, not by that of a head.
        scale = math.sqrt(q_bnse.shape[-1] / sum(self.query_widths))
        q_bsne = (q_bnse * scale).to(cached_b1te.dtype).transpose(1, 2)
        inputs = dataclasses.replace(inputs, causal=False)  # no token is later
        sums_bsne = self.attention(q_bsne, cached_b1te, cached_b1te, inputs)
        sums_bnsc = sums_bsne.transpose(1, 2)[..., : self.latent_widths[0]]
        return sums_bnsc.to(value_nwc.dtype) @ value_nwc.transpose(1, 2)


# By the flag that chooses them, as in `megatron.model.variants.VARIANTS`.
VARIANTS: dict[str, dict[type, type]] = {"multi_latent_attention": {SelfAttention: LatentAttention}}
