"""The other output that attention gets in backward after an exchange of heads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.context_parallel.heads import product, with_product
from megatron.context_parallel.kernels import (
    partial_attention,
    partial_attention_backward,
    plain_partial_attention,
    plain_partial_attention_backward,
)
from megatron.ops.compiler import eager


@pytest.mark.parametrize(
    ("dtype", "bound"),
    [(torch.float64, 1e-15), (torch.float32, 1e-6), (torch.bfloat16, 2**-15), (torch.float16, 2**-19)],
)
def test_another_output_has_the_same_product(dtype: torch.dtype, bound: float) -> None:
    torch.manual_seed(0)
    grad, out = (torch.randn(2, 3, 5, 64).to(dtype) for _ in range(2))
    grad[0, 0, 0] = 0
    grad[0, 0, 1, 1:] = 0
    grad[0, 0, 2, 1:] = 1e-7  # much smaller than the largest
    expected = (grad.double() * out.double()).sum(-1)
    other = with_product(grad, product(grad, out).unsqueeze(-1), eager)
    found = (grad.double() * other.double()).sum(-1)
    assert other.dtype == dtype and (other[0, 0, 0] == 0).all()
    error = ((found - expected).abs() / (grad.double() * out).abs().sum(-1).clamp(min=1e-30)).flatten()
    assert error[3:].max() < bound
    assert error[:3].max() < 2**-8
    grad[0, 0, 3, 5] = torch.nan
    assert with_product(grad, product(grad, out).unsqueeze(-1), eager)[0, 0, 3].isnan().any()


def inputs(kind: str) -> list[Tensor]:
    """Queries, keys, values and the gradient of the output, which in some kinds have a common part."""
    torch.manual_seed(1)
    q, k, v, grad = (torch.randn(1, 2, 128, 64) for _ in range(4))
    if kind == "means":
        v, grad = v + 3, grad + 1
    elif kind == "one large channel":
        v[..., 0] *= 100
        grad[..., 0] *= 100
    return [x.bfloat16() for x in (q, k, v, grad)]


@pytest.mark.parametrize("kind", ["normal", "means", "one large channel"])
def test_gradients_in_bf16_are_as_near_to_fp64_as_with_attentions_own_output(kind: str) -> None:
    q, k, v, grad = inputs(kind)
    q64, k64, v64, grad64 = (x.double() for x in (q, k, v, grad))
    out64, lse64 = plain_partial_attention(q64, k64, v64, None, causal=True)
    exact = plain_partial_attention_backward(grad64, q64, k64, v64, out64, lse64, None, causal=True)
    out, lse = partial_attention(q, k, v, None, causal=True)
    other = with_product(grad, product(grad, out).unsqueeze(-1), eager)

    def errors(out: Tensor) -> list[float]:
        grads = partial_attention_backward(grad, q, k, v, out, lse, None, causal=True)
        return [float((a.double() - b).norm() / b.norm()) for a, b in zip(grads, exact, strict=True)]

    assert errors(other) == pytest.approx(errors(out), rel=2e-3)
