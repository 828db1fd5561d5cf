"""Attention with other scores and another softmax.

--softmax-scale multiplies the scores in place of 1 / √d. --attn-logit-softcapping c bounds them by c tanh(score / c)
(Gemma 2, arXiv 2408.00118 section 2). --softmax-type adds a key without a value to the softmax, so that a head may
attend to nothing: with the score 0 ("off-by-one") or one that each head learns ("learnable", as in gpt-oss, arXiv
2508.10925 section 2.3). --rotary-interleaved rotates pairs of adjacent channels.

Shapes in names: b batch, n query heads of this rank, g key/value heads (groups), r query heads of a group, s queries,
t keys, d head width, w width of values, c channels.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from megatron.model.config import ModelConfig
from megatron.model.context import ModelContext
from megatron.model.transformer import SelfAttention
from megatron.model.vocabulary import OutputLayer
from megatron.ops.attention import causal_mask
from megatron.ops.cpu.document_attention import DocumentMask, scored_attention_by_document
from megatron.ops.document_attention import dense_mask
from megatron.ops.scored_attention import ScoreRules, draw_words
from megatron.parallel.parameters import normal, parameter
from megatron.parallel.slices import GlobalSlice
from megatron.variants.attention import QKNormAttention


class SoftmaxOffset(nn.Module):
    """A learned score for each head, of a key that has no value. Named as in Megatron core."""

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        heads = config.num_attention_heads
        shard = GlobalSlice((heads,), 0, (context.tp.local_range(heads),))
        self.softmax_offset = parameter(shard, normal(config.init_method_std))


class ScoreAttention(QKNormAttention):
    """Self-attention with the flags of this module, and with or without normalized queries and keys.

    PyTorch's fused attention has neither a soft cap nor another softmax. With these compiled layers have all
    scores in memory, [b, n, s, t] in fp32, and others those of a block of queries.
    """

    def __init__(self, config: ModelConfig, layer: int, context: ModelContext) -> None:
        super().__init__(config, layer, context)
        scale, width = config.softmax_scale, config.kv_channels
        self.query_scale = 1.0 if scale is None else scale * math.sqrt(width)  # attention divides by the root
        self.interleaved_channels = config.rotary_channels if config.rotary_interleaved else 0
        self.softcap, self.softmax_type = config.attn_logit_softcapping, config.softmax_type
        self.ops, self.core_attention = context.ops, None
        if config.softmax_type == "learnable":
            self.core_attention = SoftmaxOffset(config, context)
        if self.softcap is not None or config.softmax_type != "vanilla":
            ops = dataclasses.replace(context.ops, attention=self.attend)
            self.context = dataclasses.replace(context, ops=ops)

    def split_heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q_bnsd, k_bgsd, v_bgsd = super().split_heads(qkv)
        if self.query_scale != 1:
            q_bnsd = q_bnsd * self.query_scale
        if channels := self.interleaved_channels:
            q_bnsd, k_bgsd = halves(q_bnsd, channels), halves(k_bgsd, channels)
        return q_bnsd, k_bgsd, v_bgsd

    def attend(
        self,
        q_bnsd: Tensor,
        k_bgtd: Tensor,
        v_bgtw: Tensor,
        *,
        mask_bnst: Any,
        causal: bool,
        dropout: float,
    ) -> Tensor:
        """`megatron.ops.attention.attention` with this module's softmax, [b, n, s, w]."""
        sinks_n = None if self.softmax_type == "vanilla" else self.offsets(q_bnsd)
        arguments = {"mask_bnst": mask_bnst, "causal": causal, "sinks_n": sinks_n}
        if self.context.cp.size > 1:
            attention = self.ops.attention
            return attention(q_bnsd, k_bgtd, v_bgtw, **arguments, dropout=dropout, softcap=self.softcap)
        if self.ops.device_keys is not None:  # the layer is compiled
            return self.attend_whole(q_bnsd, k_bgtd, v_bgtw, **arguments, dropout=dropout)
        words = draw_words(q_bnsd.device) if dropout > 0 else None
        rules = ScoreRules(softcap=self.softcap, dropout=dropout, words=words)
        return scored_attention_by_document(q_bnsd, k_bgtd, v_bgtw, **arguments, rules=rules)

    def attend_whole(
        self,
        q_bnsd: Tensor,
        k_bgtd: Tensor,
        v_bgtw: Tensor,
        *,
        mask_bnst: Any,
        causal: bool,
        dropout: float,
        sinks_n: Tensor | None,
    ) -> Tensor:
        """`attend` as formulas of all scores, for the compiler."""
        groups, (s, d), t = k_bgtd.shape[1], q_bnsd.shape[2:], k_bgtd.shape[2]
        scores_bgrst = q_bnsd.unflatten(1, (groups, -1)) @ k_bgtd.unsqueeze(2).transpose(-1, -2)
        scores_bnst = scores_bgrst.flatten(1, 2).float() / math.sqrt(d)
        if self.softcap is not None:
            scores_bnst = self.softcap * torch.tanh(scores_bnst / self.softcap)
        allowed = as_tensor(mask_bnst)
        if allowed is None and causal:
            allowed = causal_mask(s, t, q_bnsd.device)
        if allowed is not None and allowed.dtype != torch.bool:  # a bias
            scores_bnst = scores_bnst + allowed
        elif allowed is not None:
            scores_bnst = scores_bnst.masked_fill(~allowed, -torch.inf)
        if sinks_n is not None:
            sinks_bns1 = sinks_n.view(1, -1, 1, 1).expand(*scores_bnst.shape[:3], 1)
            scores_bnst = torch.cat((scores_bnst, sinks_bns1), dim=-1)
        weights_bnst = scores_bnst.softmax(-1)[..., :t].to(v_bgtw.dtype)
        if dropout > 0:
            weights_bnst = F.dropout(weights_bnst, dropout)
        return (weights_bnst.unflatten(1, (groups, -1)) @ v_bgtw.unsqueeze(2)).flatten(1, 2)

    def offsets(self, q_bnsd: Tensor) -> Tensor:
        """The score of the key without a value for each head, [n] in fp32."""
        if self.core_attention is None:
            return q_bnsd.new_zeros(q_bnsd.shape[1], dtype=torch.float32)
        return self.ops.accumulating(self.core_attention.softmax_offset)[0].float()


def as_tensor(mask: Tensor | DocumentMask | BlockMask | None) -> Tensor | None:
    """A mask that `Ops.make_mask` made as a tensor [b, n, s, t]; b and n may be 1."""
    if isinstance(mask, DocumentMask):
        return mask.dense()
    return dense_mask(mask) if isinstance(mask, BlockMask) else mask


def halves(x_bnsd: Tensor, channels: int) -> Tensor:
    """Move the even ones of the first `channels` before the odd ones, as RoPE in halves needs them.

    Scores do not depend on the order of the channels, if it is that of queries and keys.
    """
    pairs, others = x_bnsd.split((channels, x_bnsd.shape[-1] - channels), dim=-1)
    return torch.cat((pairs.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), others), dim=-1)


class SoftcapOutputLayer(OutputLayer):
    """Output layer whose logits are bounded by c tanh(logit / c), --final-logit-softcapping."""

    def __init__(
        self, config: ModelConfig, context: ModelContext, *, first: bool, bias: bool = False
    ) -> None:
        self.softcap = config.final_logit_softcapping
        loss = dataclasses.replace(context.ops.linear_cross_entropy, softcap=self.softcap)
        ops = dataclasses.replace(context.ops, linear_cross_entropy=loss)
        super().__init__(config, dataclasses.replace(context, ops=ops), first=first, bias=bias)

    def forward(
        self,
        x_sbh: Tensor,
        word_table: Tensor | None,
        labels_bs: Tensor | None = None,
        grad_bs: Tensor | None = None,
    ) -> Tensor:
        out = super().forward(x_sbh, word_table, labels_bs, grad_bs)
        assert self.softcap is not None
        return out if labels_bs is not None else self.softcap * torch.tanh(out / self.softcap)


# By the flag that chooses them, as in `megatron.model.variants.VARIANTS`.
VARIANTS: dict[str, dict[type, type]] = {
    "final_logit_softcapping": {OutputLayer: SoftcapOutputLayer},
    "softmax_scale": {SelfAttention: ScoreAttention},
    "softmax_type": {SelfAttention: ScoreAttention},
    "attn_logit_softcapping": {SelfAttention: ScoreAttention},
    "rotary_interleaved": {SelfAttention: ScoreAttention},
}
