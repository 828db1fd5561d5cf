"""The count of operations against the formulas of arXiv 2104.04473."""

from __future__ import annotations

import pytest

from megatron.model.config import ModelConfig
from megatron.training.flops import flops_per_sample


@pytest.mark.parametrize(("layers", "hidden", "heads"), [(24, 2304, 24), (96, 12288, 96), (128, 25600, 160)])
def test_equals_the_paper(layers: int, hidden: int, heads: int) -> None:
    s, v = 2048, 51200
    config = ModelConfig(
        num_layers=layers, hidden_size=hidden, num_attention_heads=heads, max_position_embeddings=s
    )
    # Equation 3 without the quarter that recomputation adds: 72 in place of 96, and V / 12 in place of V / 16.
    paper = 72 * s * layers * hidden**2 * (1 + s / (6 * hidden) + v / (12 * layers * hidden))
    assert flops_per_sample(config, seq_length=s, padded_vocab_size=v) == pytest.approx(paper, rel=1e-12)


def test_gate_and_groups() -> None:
    """Llama 2 70B's shape: 6 operations a weight and token, and those of attention."""
    config = ModelConfig(
        num_layers=80,
        hidden_size=8192,
        num_attention_heads=64,
        group_query_attention=True,
        num_query_groups=8,
        ffn_hidden_size=28672,
        swiglu=True,
        max_position_embeddings=4096,
        untie_embeddings_and_output_weights=True,
    )
    weights = 80 * (8192 * (8192 + 2 * 1024) + 8192 * 8192 + 3 * 8192 * 28672) + 8192 * 32000
    attention = 80 * 4 * 4096**2 * 8192
    assert (
        flops_per_sample(config, seq_length=4096, padded_vocab_size=32000)
        == 6 * 4096 * weights + 3 * attention
    )
