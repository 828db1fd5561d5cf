"""Variants of the word embeddings."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron.model.config import ModelConfig
from megatron.model.context import ModelContext
from megatron.model.transformer import Norm
from megatron.model.variants import variant
from megatron.model.vocabulary import VocabParallelEmbedding


class NormalizedEmbedding(VocabParallelEmbedding):
    """Word embeddings with a norm, before positions are added (BLOOM, arXiv 2211.05100 section 3.2.2)."""

    def __init__(self, config: ModelConfig, context: ModelContext, *, tied: bool) -> None:
        super().__init__(config, context, tied=tied)
        self.norm = variant(Norm, config)(config, context)

    def forward(self, ids_sb: Tensor) -> Tensor:
        return self.norm(super().forward(ids_sb))


class ScaledEmbedding(VocabParallelEmbedding):
    """Word embeddings times √h, which is rounded to their dtype as in transformers (Gemma, arXiv 2403.08295)."""

    def forward(self, ids_sb: Tensor) -> Tensor:
        x_sbh = super().forward(ids_sb)
        return x_sbh * torch.tensor(math.sqrt(x_sbh.shape[-1])).to(x_sbh.dtype).item()


# By the flag that chooses them, as in `megatron.model.variants.VARIANTS`.
VARIANTS: dict[str, dict[type, type]] = {
    "embed_layernorm": {VocabParallelEmbedding: NormalizedEmbedding},
    "scale_embeddings": {VocabParallelEmbedding: ScaledEmbedding},
}
