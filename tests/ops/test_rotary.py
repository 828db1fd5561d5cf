"""RoPE's frequencies, as transformers has them."""

from __future__ import annotations

import pytest
import torch

from megatron.ops.rotary import rotary_angles


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_scaling_equals_transformers(factor: float) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 8192, "rope_theta": 500000.0}
    config = transformers.LlamaConfig(
        hidden_size=128, num_attention_heads=1, max_position_embeddings=131072, rope_parameters=scaling
    )
    positions = torch.tensor([[0, 1, 7, 8191, 8192, 100000]])
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    ours = rotary_angles(positions, 128, 500000.0, factor)
    # An angle of 1e5 has an error of 1e5 times that of the frequency.
    torch.testing.assert_close(ours[0][:, 0, :5], cos[:, :5], rtol=0, atol=2e-3)
    torch.testing.assert_close(ours[1][:, 0, :5], sin[:, :5], rtol=0, atol=2e-3)
    assert not torch.allclose(rotary_angles(positions, 128, 500000.0)[0], ours[0], atol=0.1)
