"""The whole layer, against NVIDIA's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron.model.config import ModelConfig
from megatron.model.context import ModelContext
from megatron.model.moe.layer import MoELayer
from megatron.ops.backend import Ops

from .nvidia_layer import CASES, EXPERTS, FFN, HIDDEN

VECTORS = Path(__file__).with_name("nvidia_layer.safetensors")


def native(name: str, theirs: dict[str, Tensor]) -> Tensor:
    """NVIDIA's tensors for a parameter: those of all experts, in our order of rows."""
    numbers = {"experts.weight1": 1, "experts.weight2": 2}
    if name not in numbers:
        return theirs[name]
    parts = [theirs[f"experts.local_experts.{e}.linear_fc{numbers[name]}.weight"] for e in range(EXPERTS)]
    return torch.cat([part if name == "experts.weight1" else part.t() for part in parts])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("grouped", [False, True], ids=["", "grouped"])
def test_as_nvidia(case: str, grouped: bool) -> None:
    found = {k.removeprefix(f"{case}/"): x for k, x in load_file(VECTORS).items() if k.startswith(f"{case}/")}
    weights, grads = (
        {k.removeprefix(prefix): x for k, x in found.items() if k.startswith(prefix)}
        for prefix in ("weight/", "gradient/")
    )
    config = ModelConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        ffn_hidden_size=FFN,
        num_experts=EXPERTS,
        max_position_embeddings=8,
        swiglu=True,
        add_bias_linear=False,
        moe_grouped_gemm=grouped,
        **CASES[case],
    )
    layer = MoELayer(config, ModelContext(vocab_size=8, padded_vocab_size=8, ops=Ops()))
    for name, p in layer.named_parameters():
        p.data = native(name, weights).clone()
    x = found["input"].requires_grad_()
    y = layer(x)
    y.backward(found["output gradient"])
    torch.testing.assert_close(y, found["output"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(x.grad, found["input gradient"], rtol=1e-5, atol=1e-6)
    for name, p in layer.named_parameters():
        if name != "router.expert_bias":  # no parameter there
            torch.testing.assert_close(p.grad, native(name, grads), rtol=1e-5, atol=2e-6)
