"""RoPE frequency scaling against transformers."""

from __future__ import annotations

import pytest
import torch

from megatron.ops.rotary import rotary_angles
from megatron.variants.rope_scaling import Scaling

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("kind", "factor", "length", "base", "channels"),
    [
        ("llama3", 8.0, 8192, 500000.0, 128),
        ("llama3", 32.0, 1024, 10000.0, 64),
        ("linear", 2.5, 4096, 10000.0, 128),
        ("yarn", 4.0, 32768, 1000000.0, 128),
        ("yarn", 16.0, 64, 10000.0, 24),
        ("yarn", 2.0, 4, 10000.0, 16),
    ],
)
def test_scaling_equals_transformers(
    kind: str, factor: float, length: int, base: float, channels: int
) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    scaling = {"rope_type": kind, "factor": factor, "rope_theta": base}
    scaling |= LLAMA3 if kind == "llama3" else {}
    scaling |= {} if kind == "linear" else {"original_max_position_embeddings": length}
    sizes = {
        "hidden_size": channels,
        "num_attention_heads": 1,
        "max_position_embeddings": int(length * factor),
    }
    theirs = LlamaRotaryEmbedding(transformers.LlamaConfig(**sizes, rope_parameters=scaling))
    positions = torch.arange(50).unsqueeze(0)
    ours = rotary_angles(positions, channels, base, Scaling(kind, factor, length))
    for x, expected in zip(ours, theirs(torch.ones(1), positions), strict=True):
        torch.testing.assert_close(x[:, 0], expected, rtol=0, atol=1e-5)
