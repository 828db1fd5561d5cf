"""Registration of the model's variants: importing this module adds the tables at the ends of others to the core's."""

from __future__ import annotations

from megatron.model.config import ModelConfig
from megatron.model.variants import ROPE_SCALINGS, VARIANTS, variant
from megatron.ops.activation import ACTIVATIONS
from megatron.variants import (
    activations,
    attention,
    attention_scores,
    biased_experts,
    embeddings,
    latent_attention,
    layer_pattern,
    layers,
    norms,
    rope_scaling,
)

for module in (
    layers,
    layer_pattern,
    attention,
    attention_scores,
    biased_experts,
    latent_attention,
    embeddings,
    norms,
):
    VARIANTS.update(module.VARIANTS)
ROPE_SCALINGS.update(rope_scaling.ROPE_SCALINGS)
ACTIVATIONS.update(activations.ACTIVATIONS)


def check_variants(config: ModelConfig) -> None:
    """Raise `InputError` if flags of a model exclude each other or do not fit together, before a run starts."""
    for part in {part for table in VARIANTS.values() for part in table}:
        variant(part, config)
    if config.use_rope_scaling:
        ROPE_SCALINGS[config.rope_scaling_type](config)
