"""The transformer that GPT and BERT are made of.

Shapes in names: s sequence, b batch, h hidden, n query heads, g key/value heads (groups), d head width,
f MLP width, t keys, which with a cache are more than the queries. With tensor parallelism n, g and f count those
of this process; with sequence parallelism the s of what lies between attention and MLP does too.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megatron.model.config import ModelConfig
from megatron.model.layers import ColumnParallelLinear, RowParallelLinear, TensorParallel
from megatron.ops.backend import Ops
from megatron.parallel.mesh import Axis
from megatron.parallel.parameters import Init, normal, ones, parameter, xavier_uniform, zeros
from megatron.parallel.random import DropoutKey, dropout, seed_dropout
from megatron.parallel.recompute import Recompute, rerun, rerun_attention
from megatron.parallel.slices import GlobalSlice, Range, whole


class KVCache:
    """Keys and values of several sequences, preallocated, of the layers and heads that a process holds.

    Memory has the shape [layers, 2, rows, g, length, d].
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: range,
        tp: Axis,
        *,
        rows: int,
        length: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Room for `length` positions of `rows` sequences."""
        self.first_layer = layers.start
        groups = max(config.num_query_groups // tp.size, 1)
        shape = (len(layers), 2, rows, groups, length, config.kv_channels)
        # Not empty: what a mask hides counts with weight zero, and zero times what is no number is none.
        self.memory = torch.zeros(shape, dtype=dtype, device=device)

    def rows(self, first: int, starts: Sequence[int], length: int) -> CacheRows:
        """The sequences from row `first` on, each about to get `length` tokens, those of row i from `starts[i]` on."""
        return CacheRows(self, first, starts, length)

    def copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Replace the first `length` positions of the rows `targets` by those of the rows `sources`, all at once."""
        self.memory[:, :, list(targets), :, :length] = self.memory[:, :, list(sources), :, :length]


class CacheRows:
    """Some sequences of a cache, with room for their new tokens."""

    def __init__(self, cache: KVCache, first: int, starts: Sequence[int], length: int) -> None:
        end = max(starts) + length
        self.first_layer = cache.first_layer
        self.memory = cache.memory[:, :, first : first + len(starts), :, :end]
        # Where the new positions lie: in all rows at the same place, or each row at its own.
        self.new = slice(starts[0], end) if len(set(starts)) == 1 else None
        device = cache.memory.device
        self.position_ids_bs = torch.tensor(starts, device=device).unsqueeze(1) + torch.arange(
            length, device=device
        )
        self.numbers_b1 = torch.arange(len(starts), device=device).unsqueeze(1)
        # What the new tokens attend to is all that there is, each other in their order, or what a mask says.
        self.causal = self.new is not None and starts[0] == 0
        self.mask_bst = None
        if not self.causal and not (self.new is not None and length == 1):
            self.mask_bst = self.position_ids_bs.unsqueeze(2) >= torch.arange(end, device=device)

    def extend(self, layer: int, k_bgsd: Tensor, v_bgsd: Tensor) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values; give all of them, [b, g, t, d]."""
        keys, values = self.memory[layer - self.first_layer]
        for memory, new_bgsd in ((keys, k_bgsd), (values, v_bgsd)):
            if self.new is not None:
                memory[:, :, self.new] = new_bgsd
            else:
                memory[self.numbers_b1, :, self.position_ids_bs] = new_bgsd.transpose(1, 2).to(memory.dtype)
        return keys, values


@dataclasses.dataclass
class Context:
    """What every layer needs beside its input."""

    rotary: tuple[Tensor, Tensor] | None = None  # cosine and sine, each [b, 1, s, channels]
    mask_bst: Tensor | None = None  # true where attention is allowed
    causal: bool = True  # without a mask it is allowed to no later position, or else everywhere
    cache: CacheRows | None = None
    dropout_key: DropoutKey = None


class Norm(nn.Module):
    """LayerNorm or RMSNorm, after `--normalization`. What it gives has the dtype of what it reads."""

    def __init__(self, config: ModelConfig, place: GlobalSlice, ops: Ops) -> None:
        super().__init__()
        self.ops, self.epsilon = ops, config.norm_epsilon
        self.weight = parameter(place, ones)
        self.bias = parameter(place, zeros) if config.normalization == "LayerNorm" else None

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return self.ops.rms_norm(x, self.weight, self.epsilon)
        return self.ops.layer_norm(x, self.weight, self.bias, self.epsilon)


def input_init(config: ModelConfig, outputs: int) -> Init:
    """Initial values of the layers that read the residual stream and have so many outputs."""
    if config.init_method_xavier_uniform:
        return xavier_uniform(config.hidden_size, outputs)
    return normal(config.init_method_std)


def output_init(config: ModelConfig) -> Init:
    """Initial values of the layers that write to the residual stream: σ / √(2 layers), so that the stream's
    variance does not grow with depth (GPT-2)."""
    return normal(config.init_method_std / math.sqrt(2 * config.num_layers))


class SelfAttention(nn.Module):
    """Multi-head attention, with heads of keys and values shared among groups of query heads.

    Tensor parallelism divides the query heads. It divides the groups too where there are enough of them;
    otherwise every process holds the keys and values of all groups, and uses those of the one that its queries
    belong to.
    """

    def __init__(self, config: ModelConfig, layer: int, tp: TensorParallel, recompute: Recompute) -> None:
        super().__init__()
        self.layer, self.tp = layer, tp
        self.dropout = config.attention_dropout
        self.recompute = recompute.granularity == "selective"
        self.width = config.kv_channels
        self.groups = max(config.num_query_groups // tp.axis.size, 1)
        heads = config.num_attention_heads // tp.axis.size
        self.queries = heads // self.groups  # of each group
        outputs = (config.num_attention_heads + 2 * config.num_query_groups) * config.kv_channels
        # Rows of the whole projection: for each group its query heads, its key, its value.
        ranges = shared = None
        self.used: tuple[Range, ...] | None = None  # rows of the projection here; None means all
        if config.num_query_groups < tp.axis.size:
            ranges, shared, own = self._shared_groups(config, heads)
            self.used = ((0, heads * self.width), own)
        self.linear_qkv = ColumnParallelLinear(
            config.hidden_size,
            outputs,
            bias=config.add_bias_linear or config.add_qkv_bias,
            init=input_init(config, outputs),
            tp=tp,
            ranges=ranges,
            shared=shared or (),
        )
        self.linear_proj = RowParallelLinear(
            config.num_attention_heads * config.kv_channels,
            config.hidden_size,
            bias=config.add_bias_linear,
            init=output_init(config),
            tp=tp,
        )

        self.q_layernorm = self.k_layernorm = None
        if config.qk_layernorm:
            # One for all heads, of which each process sees some.
            place = whole(self.width, partial=True)
            self.q_layernorm, self.k_layernorm = Norm(config, place, tp.ops), Norm(config, place, tp.ops)

    def _shared_groups(
        self, config: ModelConfig, heads: int
    ) -> tuple[tuple[Range, ...], tuple[Range, ...], Range]:
        """Rows of the projection here: `heads` queries, then keys and values of all groups; which of these rows
        all processes hold, and which are the keys and values that the queries here go with."""
        d, per_group = self.width, config.num_attention_heads // config.num_query_groups
        stride = (per_group + 2) * d
        group, first = divmod(self.tp.axis.rank * heads, per_group)
        begin = group * stride + first * d
        keys_values = tuple(
            (g * stride + per_group * d, (g + 1) * stride) for g in range(config.num_query_groups)
        )
        rows = heads * d
        own = (rows + 2 * d * group, rows + 2 * d * (group + 1))
        return ((begin, begin + rows), *keys_values), ((rows, rows + 2 * d * len(keys_values)),), own

    def forward(self, x_sbh: Tensor, context: Context) -> Tensor:
        q_bnsd, k_bgsd, v_bgsd = self.split_heads(self.linear_qkv(x_sbh, self.used))
        if self.q_layernorm is not None:
            q_bnsd, k_bgsd = self.q_layernorm(q_bnsd), self.k_layernorm(k_bgsd)
        if context.rotary is not None:
            rotate = self.tp.ops.rotate
            q_bnsd, k_bgsd = rotate(q_bnsd, *context.rotary), rotate(k_bgsd, *context.rotary)
        if context.cache is not None:
            k_bgsd, v_bgsd = context.cache.extend(self.layer, k_bgsd, v_bgsd)
            q_bnsd = q_bnsd.to(k_bgsd.dtype)
        attend = functools.partial(self._attend, context=context)
        if self.recompute:
            out_bnsd = rerun_attention(attend, q_bnsd, k_bgsd, v_bgsd)
        else:
            out_bnsd = attend(q_bnsd, k_bgsd, v_bgsd)
        return self.linear_proj(out_bnsd.permute(2, 0, 1, 3).flatten(2).to(x_sbh.dtype))

    def _attend(self, q_bnsd: Tensor, k_bgsd: Tensor, v_bgsd: Tensor, context: Context) -> Tensor:
        dropping = context.dropout_key is not None and self.dropout > 0
        if dropping:
            seed_dropout(q_bnsd.device, context.dropout_key, self.layer, "attention", self.tp.axis.rank)
        return self.tp.ops.attention(
            q_bnsd,
            k_bgsd,
            v_bgsd,
            mask_bst=context.mask_bst,
            causal=context.causal,
            dropout=self.dropout if dropping else 0.0,
        )

    def split_heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[s, b, (n + 2g) d] to q [b, n, s, d] and k, v [b, g, s, d]."""
        s, b, _ = qkv.shape
        grouped = qkv.view(s, b, self.groups, self.queries + 2, self.width)
        q, k, v = grouped.split((self.queries, 1, 1), dim=3)
        return tuple(x.flatten(2, 3).permute(1, 2, 0, 3) for x in (q, k, v))


class MLP(nn.Module):
    """Two linear layers with GELU between, or the gated form with SiLU (SwiGLU, arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        self.config, self.ops = config, tp.ops
        h, f = config.hidden_size, config.ffn_hidden_size
        begin, end = tp.part(f)
        # With a gate, the rows of the first layer are those of the gate and then those of the values.
        ranges = ((begin, end), (f + begin, f + end)) if config.swiglu else ((begin, end),)
        outputs = 2 * f if config.swiglu else f
        self.linear_fc1 = ColumnParallelLinear(
            h, outputs, bias=config.add_bias_linear, init=input_init(config, outputs), tp=tp, ranges=ranges
        )
        self.linear_fc2 = RowParallelLinear(
            f, h, bias=config.add_bias_linear, init=output_init(config), tp=tp
        )

    def forward(self, x_sbh: Tensor) -> Tensor:
        x = self.linear_fc1(x_sbh)
        x = self.ops.swiglu(x) if self.config.swiglu else self.ops.gelu(x, tanh=self.config.tanh_gelu)
        return self.linear_fc2(x)


class TransformerLayer(nn.Module):
    """Pre-norm layer: x + attention(norm(x)), then x + mlp(norm(x)), with dropout before each addition.

    In the original BERT's order (arXiv 1909.08053 figure 7a) it is norm(x) in place of x that is added to. With the
    model's first normalisation on the embeddings and its last on the output, that is BERT's x = norm(x + f(x)).

    With --fp32-residual-connection x and norm(x) are fp32, and what attention and MLP read of it is not.
    """

    def __init__(self, config: ModelConfig, layer: int, tp: TensorParallel, recompute: Recompute) -> None:
        super().__init__()
        self.layer, self.tp = layer, tp
        self.hidden_dropout = config.hidden_dropout
        self.post_norm = config.apply_residual_connection_post_layernorm
        self.input_layernorm = Norm(config, tp.replicated(config.hidden_size), tp.ops)
        self.self_attention = SelfAttention(config, layer, tp, recompute)
        self.pre_mlp_layernorm = Norm(config, tp.replicated(config.hidden_size), tp.ops)
        self.mlp = MLP(config, tp)

    def forward(self, x_sbh: Tensor, context: Context) -> Tensor:
        dtype = self.input_layernorm.weight.dtype
        normed_sbh = self.input_layernorm(x_sbh)
        attended_sbh = self._drop(self.self_attention(normed_sbh.to(dtype), context), context, "attended")
        x_sbh = (normed_sbh if self.post_norm else x_sbh) + attended_sbh
        normed_sbh = self.pre_mlp_layernorm(x_sbh)
        added_sbh = self._drop(self.mlp(normed_sbh.to(dtype)), context, "mlp")
        return (normed_sbh if self.post_norm else x_sbh) + added_sbh

    def _drop(self, x: Tensor, context: Context, site: str) -> Tensor:
        return dropout(x, self.hidden_dropout, context.dropout_key, self.layer, site, self.tp.stream)


class Transformer(nn.Module):
    """Layers one after the other, all of the model's or those of one chunk of it, and the final normalisation
    after the last."""

    def __init__(
        self, config: ModelConfig, layers: range, *, last: bool, tp: TensorParallel, recompute: Recompute
    ) -> None:
        super().__init__()
        # By their numbers in the whole model, so that names are the same in every layout.
        self.layers = nn.ModuleDict({str(i): TransformerLayer(config, i, tp, recompute) for i in layers})
        self.groups = recompute.groups(len(layers))
        self.recompute = recompute
        self.final_layernorm = Norm(config, tp.replicated(config.hidden_size), tp.ops) if last else None

    def forward(self, x_sbh: Tensor, context: Context) -> Tensor:
        layers = list(self.layers.values())
        for group, again in self.groups:

            def run(x: Tensor, group: range = group) -> Tensor:
                for i in group:
                    x = layers[i](x, context)
                return x

            x_sbh = rerun(run, x_sbh, self.recompute.axis) if again else run(x_sbh)
        if self.final_layernorm is None:
            return x_sbh
        return self.final_layernorm(x_sbh).to(self.final_layernorm.weight.dtype)
