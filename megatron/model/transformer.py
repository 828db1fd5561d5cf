"""The transformer of GPT and BERT.

Shapes in names: s sequence, b batch, h hidden, n query heads, g key/value heads (groups), d head width, f MLP width,
t keys (more than the queries if there is a cache). With tensor parallelism n, g and f are those of this rank; with
sequence parallelism so is the s of the activations between attention and MLP.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megatron.model.config import ModelConfig
from megatron.model.context import ModelContext
from megatron.model.layers import ColumnParallelLinear, RowParallelLinear
from megatron.model.mlp import MLP, input_init, output_init
from megatron.model.moe.layer import MoELayer
from megatron.model.qkv import qkv_slice
from megatron.model.variants import variant
from megatron.ops.attention import MaskSpec
from megatron.parallel.parameters import ones, parameter, zeros
from megatron.parallel.random import DropoutKey, dropout
from megatron.parallel.recompute import recompute, recompute_attention
from megatron.parallel.slices import GlobalSlice
from megatron.parallel.stages import Chunk


class Cache(Protocol):
    """Keys and values of earlier tokens, for generation; `memory` is [layers, 2, b, g, t, d], or of the tensors that a
    variant stores in their place."""

    mask_bst: Tensor | None
    causal: bool
    memory: Tensor
    window_mask_bst: Tensor | None  # of layers with a window
    window_causal: bool

    def extend(self, layer: int, *new_bgsd: Tensor) -> tuple[Tensor, ...]:
        """Store a layer's tensors of new tokens, and return those of all tokens, each [b, g, t, d]."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerInputs:
    """Inputs of every layer besides the hidden states.

    Attributes:
        rotary: cosine and sine of the RoPE angles, each [b, 1, s, channels].
        mask_bnst: true where a query may attend to a key, or a bias of the scores, or what `Ops.make_mask` makes.
        mask_spec: the description that it was made from, if it was.
        position_ids_bs: positions of the queries in their sequences.
        causal: without a mask, a query attends to no later key.
        cache: if given, attention extends it and attends to all that it holds.
        dropout_key: None drops nothing.
        sequence_grad: in training, the gradient of each sequence's auxiliary losses before their coefficients: loss
            scale over sequences of the global batch.
    """

    rotary: tuple[Tensor, Tensor] | None = None
    mask_bnst: Any = None
    mask_spec: MaskSpec | None = None
    position_ids_bs: Tensor | None = None
    causal: bool = True
    cache: Cache | None = None
    dropout_key: DropoutKey | None = None
    sequence_grad: Tensor | float | None = None

    @property
    def for_experts(self) -> tuple[Tensor | float | None, bool]:
        """`sequence_grad`, and true if attention keeps documents apart, for an MLP that is a mixture."""
        return self.sequence_grad, self.mask_spec is not None and self.mask_spec.document_ids_bs is not None


class Norm(nn.Module):
    """LayerNorm or RMSNorm (`--normalization`) over the last dimension; keeps the dtype of its input."""

    def __init__(self, config: ModelConfig, context: ModelContext, shard: GlobalSlice | None = None) -> None:
        """`shard`: shard spec of the scale, by default that of a norm of the residual stream."""
        super().__init__()
        self.ops, self.epsilon = context.ops, config.norm_epsilon
        shard = shard or context.replicated(config.hidden_size)
        self.weight = parameter(shard, ones)
        self.bias = parameter(shard, zeros) if config.normalization == "LayerNorm" else None

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return self.ops.rms_norm(x, self.ops.accumulating(self.weight)[0], self.epsilon)
        weight, bias = self.ops.accumulating(self.weight, self.bias)
        return self.ops.layer_norm(x, weight, bias, self.epsilon)


class SelfAttention(nn.Module):
    """Multi-head attention, in which a group of query heads may share a key and a value head (arXiv 2305.13245).

    Tensor parallelism splits the heads over the ranks.
    """

    def __init__(self, config: ModelConfig, layer: int, context: ModelContext) -> None:
        super().__init__()
        self.layer, self.context = layer, context
        self.dropout = config.attention_dropout
        self.recompute = context.recompute.granularity == "selective"
        d, heads = config.kv_channels, config.num_attention_heads
        self.head_width = d
        self.groups = config.kv_heads_per_rank(context.tp.size)
        self.queries_per_group = heads // context.tp.size // self.groups
        outputs = (heads + 2 * config.num_query_groups) * d
        bias = config.add_bias_linear or config.add_attention_bias
        self.linear_qkv = ColumnParallelLinear(
            config.hidden_size,
            outputs,
            bias=bias or config.add_qkv_bias,
            init=input_init(config, outputs),
            context=context,
            shard=qkv_slice(config, context),
        )
        self.linear_proj = RowParallelLinear(
            heads * d,
            config.hidden_size,
            bias=bias,
            init=output_init(config),
            context=context,
        )

    def forward(self, x_sbh: Tensor, inputs: LayerInputs) -> Tensor:
        q_bnsd, k_bgsd, v_bgsd = self.split_heads(self.linear_qkv(x_sbh))
        if inputs.rotary is not None:
            q_bnsd = self.context.ops.apply_rotary_emb(q_bnsd, *inputs.rotary)
            k_bgsd = self.context.ops.apply_rotary_emb(k_bgsd, *inputs.rotary)
        if inputs.cache is not None:
            k_bgsd, v_bgsd = inputs.cache.extend(self.layer, k_bgsd, v_bgsd)
            q_bnsd = q_bnsd.to(k_bgsd.dtype)
        attention = functools.partial(self.attention, inputs=inputs)
        if self.recompute:
            out_bnsd = recompute_attention(attention, q_bnsd, k_bgsd, v_bgsd)
        else:
            out_bnsd = attention(q_bnsd, k_bgsd, v_bgsd)
        return self.linear_proj(out_bnsd.permute(2, 0, 1, 3).flatten(2).to(x_sbh.dtype))

    def attention(self, q_bnsd: Tensor, k_bgtd: Tensor, v_bgtd: Tensor, inputs: LayerInputs) -> Tensor:
        """softmax(q kᵀ / √d) v with dropout, [b, n, s, d]."""
        dropout = 0.0
        if inputs.dropout_key is not None and self.dropout > 0:
            dropout = self.dropout
            if not torch.compiler.is_compiling():  # else the layer has done so
                # By the tensor-parallel rank, since each rank has other heads.
                inputs.dropout_key.seed_generator(q_bnsd.device, "attention", self.context.tp.rank)
        return self.context.ops.attention(
            q_bnsd, k_bgtd, v_bgtd, mask_bnst=inputs.mask_bnst, causal=inputs.causal, dropout=dropout
        )

    def split_heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[s, b, (n + 2g) d], each group its queries, key and value, to q [b, n, s, d] and k, v [b, g, s, d]."""
        s, b, _ = qkv.shape
        by_group = qkv.view(s, b, self.groups, self.queries_per_group + 2, self.head_width)
        q, k, v = (
            x.flatten(2, 3).permute(1, 2, 0, 3) for x in by_group.split((self.queries_per_group, 1, 1), dim=3)
        )
        return q, k, v


class TransformerLayer(nn.Module):
    """Pre-norm layer: x + attention(norm(x)), then x + mlp(norm(x)), with dropout before each addition.

    With --fp32-residual-connection x and norm(x) are fp32, and the inputs of attention and MLP are not.
    """

    def __init__(self, config: ModelConfig, layer: int, context: ModelContext) -> None:
        super().__init__()
        self.layer, self.context = layer, context
        self.hidden_dropout = config.hidden_dropout
        self.input_layernorm = variant(Norm, config)(config, context)
        self.self_attention = variant(SelfAttention, config)(config, layer, context)
        self.pre_mlp_layernorm = variant(Norm, config)(config, context)
        has_experts = config.expert_layers(config.num_layers)[layer]
        self.mlp = MoELayer(config, context) if has_experts else MLP(config, context)

    def forward(self, x_sbh: Tensor, inputs: LayerInputs) -> Tensor:
        """`compute` with the dropout key of this layer; the unit that torch.compile compiles, once for all layers."""
        if inputs.dropout_key is not None and (self.hidden_dropout or self.self_attention.dropout):
            key = inputs.dropout_key.at_layer(self.layer)
            inputs = dataclasses.replace(inputs, dropout_key=key)
            if self.self_attention.dropout and self.context.ops.device_keys is not None:
                key.seed_generator(x_sbh.device, "attention", self.context.tp.rank)
        return self.context.ops.run(type(self).compute, self, x_sbh, inputs)

    def compute(self, x_sbh: Tensor, inputs: LayerInputs) -> Tensor:
        """The residual stream after this layer, [s, b, h]."""
        x_sbh = x_sbh + self.attention_block(self.input_layernorm(x_sbh), inputs)
        return x_sbh + self.mlp_block(self.pre_mlp_layernorm(x_sbh), inputs)

    def attention_block(self, x_sbh: Tensor, inputs: LayerInputs) -> Tensor:
        """Attention and dropout."""
        return self.drop(self.self_attention(x_sbh.to(self.dtype), inputs), inputs, "attended")

    def mlp_block(self, x_sbh: Tensor, inputs: LayerInputs) -> Tensor:
        """MLP and dropout."""
        return self.drop(self.mlp(x_sbh.to(self.dtype), *inputs.for_experts), inputs, "mlp")

    def drop(self, x: Tensor, inputs: LayerInputs, site: str) -> Tensor:
        """Dropout with a mask of its own at each `site` of a layer."""
        return dropout(x, self.hidden_dropout, inputs.dropout_key, site, *self.context.dropout_parts)

    @property
    def dtype(self) -> torch.dtype:
        return self.self_attention.linear_proj.weight.dtype


class Transformer(nn.Module):
    """The layers of one chunk of the model, and the final norm after the last chunk."""

    def __init__(self, config: ModelConfig, context: ModelContext, chunk: Chunk) -> None:
        super().__init__()
        # Numbered as in the whole model, so that names are the same in every layout.
        layer_class = variant(TransformerLayer, config)
        self.layers = nn.ModuleDict({str(i): layer_class(config, i, context) for i in chunk.layers})
        self.recompute = context.recompute
        self.final_layernorm = variant(Norm, config)(config, context) if chunk.last else None

    def forward(self, x_sbh: Tensor, inputs: LayerInputs) -> Tensor:
        layers = list(self.layers.values())
        for group, recomputed in self.recompute.groups(len(layers)):

            def run(x: Tensor, group: range = group) -> Tensor:
                for i in group:
                    x = layers[i](x, inputs)
                return x

            x_sbh = recompute(run, x_sbh, self.recompute.axis) if recomputed else run(x_sbh)
        if self.final_layernorm is None:
            return x_sbh
        return self.final_layernorm(x_sbh).to(self.final_layernorm.weight.dtype)
