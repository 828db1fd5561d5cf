"""Gradients of the norms' weights over many rows."""

from __future__ import annotations

import pytest
import torch

from megatron.ops.norm import layer_norm, rms_norm

ROWS = 8192


@pytest.mark.parametrize("weights", [torch.float32, None], ids=["fp32", "same"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_of_many_rows(dtype: torch.dtype, weights: torch.dtype | None) -> None:
    """Each row adds 1 to the gradient of the bias, and ±1 to that of the weight, where x is ±1 in turn."""
    x = torch.tensor([[1.0, -1.0]]).repeat(ROWS, 4).to(dtype).requires_grad_()
    weight, bias = (torch.ones(8, dtype=weights or dtype, requires_grad=True) for _ in range(2))
    layer_norm(x, weight, bias, 1e-9).backward(torch.ones_like(x))
    assert bias.grad.tolist() == [ROWS] * 8 and bias.grad.dtype == bias.dtype
    assert weight.grad.tolist() == pytest.approx([ROWS, -ROWS] * 4, rel=1e-5)
    weight.grad = None
    rms_norm(x, weight, 1e-9).backward(torch.ones_like(x))
    assert weight.grad.tolist() == pytest.approx([ROWS, -ROWS] * 4, rel=1e-5)


def test_half_precision_saves_its_input_in_16_bits() -> None:
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer_norm(x, torch.ones(8).bfloat16(), torch.zeros(8).bfloat16(), 1e-5)
    assert [t.dtype for t in saved if t.shape == x.shape] == [torch.bfloat16]
