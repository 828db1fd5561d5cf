"""Registration of the model's variants: importing this module adds the tables at the ends of others to the core's."""

from __future__ import annotations

from megatron.model.variants import ROPE_SCALINGS, VARIANTS
from megatron.ops.activation import ACTIVATIONS
from megatron.variants import (
    activations,
    attention,
    embeddings,
    latent_attention,
    layer_pattern,
    layers,
    norms,
    rope_scaling,
)

for module in (layers, layer_pattern, attention, latent_attention, embeddings, norms):
    VARIANTS.update(module.VARIANTS)
ROPE_SCALINGS.update(rope_scaling.ROPE_SCALINGS)
ACTIVATIONS.update(activations.ACTIVATIONS)
