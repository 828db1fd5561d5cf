"""Counts of operations and parameters, against the formulas of arXiv 2104.04473 and real models."""

from __future__ import annotations

import pytest
import torch

from megatron.flags import InputError
from megatron.model.config import ModelConfig
from megatron.model.gpt import GPTModel
from megatron.training.costs import check_memory, flops_per_sample, parameter_count


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


@pytest.mark.parametrize(
    ("billions", "layers", "hidden", "heads"), [(7.5, 36, 4096, 32), (1008.0, 128, 25600, 160)]
)
def test_parameters_equal_the_paper(billions: float, layers: int, hidden: int, heads: int) -> None:
    s, v = 2048, 51200
    config = ModelConfig(
        num_layers=layers, hidden_size=hidden, num_attention_heads=heads, max_position_embeddings=s
    )
    paper = 12 * layers * hidden**2 * (1 + 13 / (12 * hidden) + (v + s) / (12 * layers * hidden))
    assert parameter_count(config, v) == round(paper) + 2 * hidden
    assert parameter_count(config, v) / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"add_bias_linear": False, "normalization": "RMSNorm"},
        {"swiglu": True, "position_embedding_type": "rope", "untie_embeddings_and_output_weights": True},
        {"group_query_attention": True, "num_query_groups": 2, "kv_channels": 12},
    ],
)
def test_parameters_equal_a_model(fields: dict) -> None:
    config = ModelConfig(
        num_layers=3, hidden_size=32, num_attention_heads=4, max_position_embeddings=16, **fields
    )
    model = GPTModel(config, vocab_size=100, padded_vocab_size=128)
    assert parameter_count(config, 128) == sum(p.numel() for p in model.parameters())


def test_a_model_that_cannot_fit_is_refused() -> None:
    check_memory(10**6, bf16=False, device=torch.device("cpu"))
    with pytest.raises(InputError, match=r"16,000\.0 GB.*cpu has"):
        check_memory(10**12, bf16=False, device=torch.device("cpu"))
