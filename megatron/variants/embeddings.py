"""Variants of the word embeddings."""

from __future__ import annotations

from torch import Tensor

from megatron.model.config import ModelConfig
from megatron.model.context import ModelContext
from megatron.model.transformer import Norm
from megatron.model.vocabulary import VocabParallelEmbedding


class NormalizedEmbedding(VocabParallelEmbedding):
    """Word embeddings with a norm, before positions are added (BLOOM, arXiv 2211.05100 section 3.2.2)."""

    def __init__(self, config: ModelConfig, context: ModelContext, *, tied: bool) -> None:
        super().__init__(config, context, tied=tied)
        self.norm = Norm(config, context)

    def forward(self, ids_sb: Tensor) -> Tensor:
        return self.norm(super().forward(ids_sb))
