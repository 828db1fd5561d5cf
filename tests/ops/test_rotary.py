"""RoPE frequency scaling against transformers."""

from __future__ import annotations

import pytest
import torch

from megatron.ops.rotary import scale_rope_freqs


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_scaling_equals_transformers(factor: float) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 8192, "rope_theta": 500000.0}
    sizes = {"hidden_size": 128, "num_attention_heads": 1, "max_position_embeddings": 131072}
    theirs = LlamaRotaryEmbedding(transformers.LlamaConfig(**sizes, rope_parameters=scaling)).inv_freq
    plain = 500000.0 ** -(torch.arange(0, 128, 2) / 128)
    torch.testing.assert_close(scale_rope_freqs(plain, factor), theirs, rtol=1e-6, atol=0)
    assert theirs[0] == plain[0] and theirs[-1] == pytest.approx(plain[-1].item() / factor)
