"""Tables of the model's variants, by the flags that choose them. Importing this module fills the core's registry."""

from __future__ import annotations

from megatron.model.transformer import Norm, SelfAttention, Transformer, TransformerLayer
from megatron.model.variants import ROPE_SCALINGS, VARIANTS
from megatron.model.vocabulary import VocabParallelEmbedding
from megatron.ops.activation import ACTIVATIONS
from megatron.variants.activations import geglu, geglu_tanh, relu, swiglu
from megatron.variants.attention import AlibiTransformer, QKNormAttention
from megatron.variants.embeddings import NormalizedEmbedding, ScaledEmbedding
from megatron.variants.layers import NormAfterLayer, ParallelLayer, PostNormLayer
from megatron.variants.norms import ZeroCenteredNorm
from megatron.variants.rope_scaling import Scaling

VARIANTS.update(
    {
        "apply_residual_connection_post_layernorm": {TransformerLayer: PostNormLayer},
        "use_parallel_residual": {TransformerLayer: ParallelLayer},
        "norm_after": {TransformerLayer: NormAfterLayer},
        "qk_layernorm": {SelfAttention: QKNormAttention},
        "qk_layernorm_all_heads": {SelfAttention: QKNormAttention},
        "position_embedding_type": {Transformer: AlibiTransformer},
        "embed_layernorm": {VocabParallelEmbedding: NormalizedEmbedding},
        "scale_embeddings": {VocabParallelEmbedding: ScaledEmbedding},
        "apply_layernorm_1p": {Norm: ZeroCenteredNorm},
    }
)
ROPE_SCALINGS.update(dict.fromkeys(("llama3", "linear", "yarn"), Scaling.from_config))
ACTIVATIONS.update({"relu": relu, "swiglu": swiglu, "geglu": geglu, "geglu_tanh": geglu_tanh})
