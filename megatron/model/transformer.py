"""The transformer that GPT and BERT are made of.

Shapes in names: s sequence, b batch, h hidden, n query heads, g key/value heads (groups), d head width,
f MLP width, t keys, which with a cache are more than the queries.
"""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.model.config import ModelConfig
from megatron.model.parameters import Init, normal, ones, parameter, xavier_uniform, zeros
from megatron.ops.activation import gelu, swiglu
from megatron.ops.attention import attention
from megatron.ops.norm import layer_norm, rms_norm
from megatron.ops.rotary import rotate


class KVCache:
    """Keys and values of the positions seen so far, preallocated, for every layer. For generation."""

    def __init__(
        self, config: ModelConfig, *, batch: int, length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Room for `length` positions of `batch` sequences."""
        shape = (config.num_layers, 2, batch, config.num_query_groups, length, config.kv_channels)
        self.memory = torch.empty(shape, dtype=dtype, device=device)
        self.position = 0

    def extend(self, layer: int, k_bgsd: Tensor, v_bgsd: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new positions of a layer; give its keys and values from the first position on, [b, g, t, d].

        `position` is advanced by the model once all layers have stored theirs.
        """
        end = self.position + k_bgsd.shape[2]
        keys, values = self.memory[layer]
        keys[:, :, self.position : end] = k_bgsd
        values[:, :, self.position : end] = v_bgsd
        return keys[:, :, :end], values[:, :, :end]


@dataclasses.dataclass
class AttentionContext:
    """What every layer's attention needs beside its input."""

    rotary: tuple[Tensor, Tensor] | None = None  # cosine and sine, each [b, 1, s, channels]
    mask_bst: Tensor | None = None  # true where attention is allowed; None means causal
    cache: KVCache | None = None


class Linear(nn.Module):
    """x Wᵀ + b, with W [outputs, inputs] as in torch."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, init: Init) -> None:
        super().__init__()
        self.weight = parameter(outputs, inputs, init=init)
        self.bias = parameter(outputs, init=zeros) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Norm(nn.Module):
    """LayerNorm or RMSNorm, after `--normalization`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.epsilon = config.norm_epsilon
        self.weight = parameter(config.hidden_size, init=ones)
        self.bias = parameter(config.hidden_size, init=zeros) if config.normalization == "LayerNorm" else None

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return rms_norm(x, self.weight, self.epsilon)
        return layer_norm(x, self.weight, self.bias, self.epsilon)


def input_init(config: ModelConfig) -> Init:
    """Initial values of the layers that read the residual stream."""
    return xavier_uniform if config.init_method_xavier_uniform else normal(config.init_method_std)


def output_init(config: ModelConfig) -> Init:
    """Initial values of the layers that write to the residual stream: σ / √(2 layers), so that the stream's
    variance does not grow with depth (GPT-2)."""
    return normal(config.init_method_std / math.sqrt(2 * config.num_layers))


class SelfAttention(nn.Module):
    """Multi-head attention, with heads of keys and values shared among groups of query heads."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.config = config
        heads, groups, width = config.num_attention_heads, config.num_query_groups, config.kv_channels
        # Rows of the joint projection: for each group its query heads, its key, its value.
        self.linear_qkv = Linear(
            config.hidden_size,
            (heads + 2 * groups) * width,
            bias=config.add_bias_linear,
            init=input_init(config),
        )
        self.linear_proj = Linear(
            heads * width, config.hidden_size, bias=config.add_bias_linear, init=output_init(config)
        )

    def forward(self, x_sbh: Tensor, context: AttentionContext) -> Tensor:
        q_bnsd, k_bgsd, v_bgsd = self.split_heads(self.linear_qkv(x_sbh))
        if context.rotary is not None:
            q_bnsd, k_bgsd = rotate(q_bnsd, *context.rotary), rotate(k_bgsd, *context.rotary)
        if context.cache is not None:
            k_bgsd, v_bgsd = context.cache.extend(self.layer, k_bgsd, v_bgsd)
        out_bnsd = attention(
            q_bnsd,
            k_bgsd,
            v_bgsd,
            mask_bst=context.mask_bst,
            dropout=self.config.attention_dropout if self.training else 0.0,
        )
        return self.linear_proj(out_bnsd.permute(2, 0, 1, 3).flatten(2))

    def split_heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[s, b, (n + 2g) d] to q [b, n, s, d], k and v [b, g, s, d]."""
        s, b, _ = qkv.shape
        groups, width = self.config.num_query_groups, self.config.kv_channels
        queries = self.config.num_attention_heads // groups
        grouped = qkv.view(s, b, groups, queries + 2, width)
        q, k, v = grouped.split((queries, 1, 1), dim=3)
        return tuple(x.flatten(2, 3).permute(1, 2, 0, 3) for x in (q, k, v))


class MLP(nn.Module):
    """Two linear layers with GELU between, or the gated form with SiLU (SwiGLU, arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        h, f = config.hidden_size, config.ffn_hidden_size
        # With a gate, the rows of the first layer are those of the gate and then those of the values.
        self.linear_fc1 = Linear(
            h, 2 * f if config.swiglu else f, bias=config.add_bias_linear, init=input_init(config)
        )
        self.linear_fc2 = Linear(f, h, bias=config.add_bias_linear, init=output_init(config))

    def forward(self, x_sbh: Tensor) -> Tensor:
        x = self.linear_fc1(x_sbh)
        x = swiglu(x) if self.config.swiglu else gelu(x, tanh=self.config.tanh_gelu)
        return self.linear_fc2(x)


class TransformerLayer(nn.Module):
    """Pre-norm layer: x + attention(norm(x)), then x + mlp(norm(x)), with dropout before each addition."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.hidden_dropout = config.hidden_dropout
        self.input_layernorm = Norm(config)
        self.self_attention = SelfAttention(config, layer)
        self.pre_mlp_layernorm = Norm(config)
        self.mlp = MLP(config)

    def forward(self, x_sbh: Tensor, context: AttentionContext) -> Tensor:
        attended = self.self_attention(self.input_layernorm(x_sbh), context)
        x_sbh = x_sbh + F.dropout(attended, self.hidden_dropout, self.training)
        processed = self.mlp(self.pre_mlp_layernorm(x_sbh))
        return x_sbh + F.dropout(processed, self.hidden_dropout, self.training)


class Transformer(nn.Module):
    """The layers, one after the other, and the final normalisation."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TransformerLayer(config, i) for i in range(config.num_layers))
        self.final_layernorm = Norm(config)

    def forward(self, x_sbh: Tensor, context: AttentionContext) -> Tensor:
        for layer in self.layers:
            x_sbh = layer(x_sbh, context)
        return self.final_layernorm(x_sbh)
