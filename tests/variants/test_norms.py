"""Norms with the scale 1 + w."""

from __future__ import annotations

import pytest
import torch

from megatron.model.config import ModelConfig
from megatron.model.context import ModelContext
from megatron.model.transformer import Norm
from megatron.variants.norms import ZeroCenteredNorm


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_small_weights_count_in_bf16(normalization: str) -> None:
    """1 + 0.001 has no bf16 value of its own."""
    config = ModelConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        max_position_embeddings=8,
        normalization=normalization,
    )
    context = ModelContext(vocab_size=8, padded_vocab_size=8)
    norm, plain = ZeroCenteredNorm(config, context), Norm(config, context)
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    bias = {"bias": torch.full((8,), 0.5)} if normalization == "LayerNorm" else {}
    norm.load_state_dict({"weight": torch.full((8,), 0.001), **bias}, assign=True)
    plain.load_state_dict({"weight": torch.full((8,), 1.001), **bias}, assign=True)
    expected = plain(x.float()).bfloat16()
    norm.bfloat16()
    assert norm(x).dtype == torch.bfloat16
    assert norm(x).equal(expected)
