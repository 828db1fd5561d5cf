"""Variants of the norms."""

from __future__ import annotations

from torch import Tensor

from megatron.model.config import ModelConfig
from megatron.model.context import ModelContext
from megatron.model.transformer import Norm
from megatron.parallel.parameters import parameter, zeros
from megatron.parallel.slices import GlobalSlice


class ZeroCenteredNorm(Norm):
    """Norm with the scale 1 + w, computed in fp32, since 16 bits have few digits near 1."""

    def __init__(self, config: ModelConfig, context: ModelContext, shard: GlobalSlice | None = None) -> None:
        super().__init__(config, context, shard)
        self.weight = parameter(shard or context.replicated(config.hidden_size), zeros)

    def forward(self, x: Tensor) -> Tensor:
        y, scale = x.float(), 1 + self.weight.float()
        if self.bias is None:
            return self.ops.rms_norm(y, scale, self.epsilon).to(x.dtype)
        return self.ops.layer_norm(y, scale, self.bias.float(), self.epsilon).to(x.dtype)


# By the flag that chooses them, as in `megatron.model.variants.VARIANTS`.
VARIANTS: dict[str, dict[type, type]] = {"apply_layernorm_1p": {Norm: ZeroCenteredNorm}}
