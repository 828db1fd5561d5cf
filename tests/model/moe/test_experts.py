"""Grouped products equal one product after the other."""

from __future__ import annotations

import pytest
import torch
from models import config_of
from torch import Tensor

from megatron.model.context import ModelContext
from megatron.model.moe.experts import Experts
from megatron.parallel.mesh import ALONE

FLAGS = "--disable-bias-linear --num-experts 4 --moe-ffn-hidden-size 24"


def outputs(counts: list[int], dtype: torch.dtype, flags: str, *, accumulates: bool = False) -> list[Tensor]:
    """Output and gradients of the rows, their weights, and the experts' weights, for two backward passes."""
    config = config_of(f"{FLAGS} {flags}").model
    experts = Experts(config, ModelContext(vocab_size=60, padded_vocab_size=64, tp=ALONE)).to(dtype)
    torch.manual_seed(0)
    x, weights = torch.randn(sum(counts), 32, dtype=dtype), torch.rand(sum(counts))
    with torch.no_grad():
        for p in experts.parameters():
            p.copy_(torch.randn(p.shape) / 4)
            if accumulates:
                p.main_grad = torch.zeros(p.shape)
    x.requires_grad_()
    weights.requires_grad_()
    for _ in range(2):
        out = experts(x, weights, counts)
        # The gradient of a sum is expanded, not contiguous.
        (out.sum() + out.float().square().sum().to(dtype)).backward()
    grads = [p.main_grad if accumulates else p.grad for p in experts.parameters()]
    return [out.detach(), x.grad, weights.grad, *grads]


@pytest.mark.parametrize("counts", [[5, 3, 8, 1], [0, 9, 0, 4], [0, 0, 0, 7], [0, 0, 0, 0]])
@pytest.mark.parametrize("gate", ["", "--swiglu"])
@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=["fp32", "bf16"]
)
def test_grouped_products(
    counts: list[int], gate: str, accumulates: bool, dtype: torch.dtype, tolerance: float
) -> None:
    loop = outputs(counts, dtype, gate, accumulates=accumulates)
    grouped = outputs(counts, dtype, f"{gate} --moe-grouped-gemm", accumulates=accumulates)
    for one, other in zip(loop, grouped, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert (one.double() - other.double()).norm() <= tolerance * one.double().norm()


def test_experts_without_rows_have_no_gradient() -> None:
    *_, weight1, weight2 = outputs([0, 9, 0, 4], torch.float32, "")
    for weight in (weight1, weight2):
        assert [bool(part.any()) for part in weight.chunk(4)] == [False, True, False, True]
