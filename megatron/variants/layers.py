"""Orders of a layer's attention, MLP and norms other than pre-norm."""

from __future__ import annotations

from torch import Tensor

from megatron.model.config import ModelConfig
from megatron.model.context import ModelContext
from megatron.model.transformer import LayerInputs, Norm, TransformerLayer
from megatron.model.variants import variant


class PostNormLayer(TransformerLayer):
    """The original BERT's order (arXiv 1909.08053 figure 7a): norm(x) takes the place of x in both sums.

    With a first norm on the embeddings and the last one on the output, that is BERT's x = norm(x + f(x)).
    """

    def compute(self, x_sbh: Tensor, inputs: LayerInputs) -> Tensor:
        x_sbh = self.input_layernorm(x_sbh)
        x_sbh = self.pre_mlp_layernorm(x_sbh + self.attention_block(x_sbh, inputs))
        return x_sbh + self.mlp_block(x_sbh, inputs)


class ParallelLayer(TransformerLayer):
    """Parallel residual, x + attention(norm(x)) + mlp(norm(x)), with two norms (GPT-NeoX, arXiv 2204.06745)."""

    def compute(self, x_sbh: Tensor, inputs: LayerInputs) -> Tensor:
        attended_sbh = self.attention_block(self.input_layernorm(x_sbh), inputs)
        return x_sbh + attended_sbh + self.mlp_block(self.pre_mlp_layernorm(x_sbh), inputs)


class NormAfterLayer(TransformerLayer):
    """Norms of the outputs, x + norm(attention(x)), then x + norm(mlp(x)) (OLMo 2, arXiv 2501.00656)."""

    def __init__(self, config: ModelConfig, layer: int, context: ModelContext) -> None:
        super().__init__(config, layer, context)
        self.post_self_attn_layernorm, self.post_mlp_layernorm = self.input_layernorm, self.pre_mlp_layernorm
        del self.input_layernorm, self.pre_mlp_layernorm

    def compute(self, x_sbh: Tensor, inputs: LayerInputs) -> Tensor:
        attended_sbh = self.post_self_attn_layernorm(self.self_attention(x_sbh.to(self.dtype), inputs))
        x_sbh = x_sbh + self.drop(attended_sbh, inputs, "attended")
        mlp_sbh = self.post_mlp_layernorm(self.mlp(x_sbh.to(self.dtype), *inputs.for_experts))
        return x_sbh + self.drop(mlp_sbh, inputs, "mlp")


class SandwichNormLayer(TransformerLayer):
    """Norms of inputs and outputs, x + norm(attention(norm(x))), then x + norm(mlp(norm(x))) (Gemma 2, arXiv 2408.00118
    section 2; "sandwich norm" of arXiv 2105.13290)."""

    def __init__(self, config: ModelConfig, layer: int, context: ModelContext) -> None:
        super().__init__(config, layer, context)
        self.post_self_attn_layernorm = variant(Norm, config)(config, context)
        self.post_mlp_layernorm = variant(Norm, config)(config, context)

    def compute(self, x_sbh: Tensor, inputs: LayerInputs) -> Tensor:
        attended_sbh = self.self_attention(self.input_layernorm(x_sbh).to(self.dtype), inputs)
        x_sbh = x_sbh + self.drop(self.post_self_attn_layernorm(attended_sbh), inputs, "attended")
        mlp_sbh = self.mlp(self.pre_mlp_layernorm(x_sbh).to(self.dtype), *inputs.for_experts)
        return x_sbh + self.drop(self.post_mlp_layernorm(mlp_sbh), inputs, "mlp")


# By the flag that chooses them, as in `megatron.model.variants.VARIANTS`.
VARIANTS: dict[str, dict[type, type]] = {
    "apply_residual_connection_post_layernorm": {TransformerLayer: PostNormLayer},
    "use_parallel_residual": {TransformerLayer: ParallelLayer},
    "norm_after": {TransformerLayer: NormAfterLayer},
    "sandwich_norm": {TransformerLayer: SandwichNormLayer},
}
