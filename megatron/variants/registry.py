"""Tables of the model's variants, by the flags that choose them. Importing this module fills the core's registry."""

from __future__ import annotations

from megatron.model.transformer import SelfAttention, TransformerLayer
from megatron.model.variants import ROPE_SCALINGS, VARIANTS
from megatron.ops.activation import ACTIVATIONS, COMPILED
from megatron.variants.activations import relu, relu_backward
from megatron.variants.attention import AllHeadsNormAttention
from megatron.variants.layers import NormAfterLayer, ParallelLayer, PostNormLayer
from megatron.variants.rope_scaling import Scaling

VARIANTS.update(
    {
        "apply_residual_connection_post_layernorm": {TransformerLayer: PostNormLayer},
        "use_parallel_residual": {TransformerLayer: ParallelLayer},
        "norm_after": {TransformerLayer: NormAfterLayer},
        "qk_layernorm_all_heads": {SelfAttention: AllHeadsNormAttention},
    }
)
ROPE_SCALINGS.update(dict.fromkeys(("llama3", "linear", "yarn"), Scaling.from_config))
ACTIVATIONS["relu"] = relu
COMPILED["relu"] = (relu, relu_backward)
