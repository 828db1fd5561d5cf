"""The dense MLP of a transformer layer, and the initial values of linear layers."""

from __future__ import annotations

import math

from torch import Tensor, nn

from megatron.model.config import ModelConfig
from megatron.model.context import ModelContext
from megatron.model.layers import ColumnParallelLinear, RowParallelLinear
from megatron.parallel.parameters import Init, normal, xavier_uniform
from megatron.parallel.slices import GlobalSlice


def input_init(config: ModelConfig, outputs: int) -> Init:
    """Initial values of a layer from the residual stream to `outputs` features."""
    if config.init_method_xavier_uniform:
        return xavier_uniform(config.hidden_size, outputs)
    return normal(config.init_method_std)


def output_init(config: ModelConfig) -> Init:
    """Initial values of a layer that writes to the residual stream: N(0, σ² / 2 layers), so that the variance of the
    stream does not grow with depth (GPT-2)."""
    return normal(config.init_method_std / math.sqrt(2 * config.num_layers))


class MLP(nn.Module):
    """Two linear layers and an activation, by default GELU, or the gated form with SiLU (SwiGLU, arXiv 2002.05202)."""

    def __init__(
        self, config: ModelConfig, context: ModelContext, ffn_hidden_size: int | None = None
    ) -> None:
        """`ffn_hidden_size`: by default that of the config."""
        super().__init__()
        self.activation, self.ops = config.activation, context.ops
        h, f = config.hidden_size, ffn_hidden_size or config.ffn_hidden_size
        outputs, shard = f, None
        if config.gated:
            # The weights of gate and up, one above the other: each rank holds a part of both.
            begin, end = context.tp.local_range(f)
            outputs, shard = 2 * f, GlobalSlice((2 * f, h), 0, ((begin, end), (f + begin, f + end)))
        bias, init = config.add_bias_linear or config.add_mlp_bias, input_init(config, outputs)
        self.linear_fc1 = ColumnParallelLinear(h, outputs, bias=bias, init=init, context=context, shard=shard)
        self.linear_fc2 = RowParallelLinear(f, h, bias=bias, init=output_init(config), context=context)

    def forward(
        self, x_sbh: Tensor, sequence_grad: Tensor | float | None = None, documents: bool = False
    ) -> Tensor:
        """[s, b, h] to [s, b, h]. The others are for mixtures of experts."""
        return self.linear_fc2(self.ops.activation(self.linear_fc1(x_sbh), self.activation))
