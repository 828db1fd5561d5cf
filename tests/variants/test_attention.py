"""Attention with a bias of positions (ALiBi)."""

from __future__ import annotations

import pytest
import torch

from megatron.errors import InputError
from megatron.interop.external import meta_model
from megatron.model.config import ModelConfig
from megatron.ops.attention import document_mask
from megatron.variants.attention import alibi_bias, alibi_slopes

CPU = torch.device("cpu")


def test_slopes_of_the_paper() -> None:
    """arXiv 2108.12409 section 3: 1/2, 1/4, ..., 1/256 for 8 heads; for 16 also the square roots between."""
    assert alibi_slopes(8, CPU).tolist() == [2.0**-i for i in range(1, 9)]
    torch.testing.assert_close(alibi_slopes(16, CPU), 2.0 ** -(torch.arange(1, 17) / 2))


@pytest.mark.parametrize("heads", [1, 6, 12, 40, 112])
def test_slopes_equal_those_of_transformers(heads: int) -> None:
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    theirs = bloom.build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(alibi_slopes(heads, CPU), theirs)


def test_the_bias_of_documents() -> None:
    bias = alibi_bias(torch.tensor(0.5).view(1, 1, 1), document_mask(torch.tensor([[0, 0, 1]])).unsqueeze(1))
    never = -torch.inf
    assert bias.tolist() == [[[[0, never, never], [-0.5, 0, never], [never, never, 0]]]]


def test_norms_of_all_heads_need_the_norms_and_rms() -> None:
    sizes = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "max_position_embeddings": 8}
    norms = {"qk_layernorm": True, "normalization": "RMSNorm"}
    meta_model("GPT", ModelConfig(**sizes, **norms, qk_layernorm_all_heads=True), 10)
    for missing in norms:
        others = {name: value for name, value in norms.items() if name != missing}
        with pytest.raises(InputError, match="--qk-layernorm-all-heads needs --qk-layernorm and"):
            meta_model("GPT", ModelConfig(**sizes, **others, qk_layernorm_all_heads=True), 10)


def test_bert_is_refused() -> None:
    config = ModelConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        max_position_embeddings=8,
        position_embedding_type="alibi",
    )
    with pytest.raises(InputError, match="--position-embedding-type: alibi is for causal attention"):
        meta_model("BERT", config, 10)
