"""The compiled forms of the activations in megatron/variants, against autograd of the plain ones."""

from __future__ import annotations

import pytest
import torch

from megatron.ops.activation import activation, compiled_activation
from megatron.ops.compiler import eager


@pytest.mark.parametrize("name", ["relu", "geglu", "geglu_tanh"])
def test_gradients_equal_autograd(name: str) -> None:
    x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    plain = activation(x, name)
    compiled = compiled_activation(eager, x, name)
    weight = torch.randn(plain.shape, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(compiled, plain)
    (expected,) = torch.autograd.grad((plain * weight).sum(), x)
    (found,) = torch.autograd.grad((compiled * weight).sum(), x)
    torch.testing.assert_close(found, expected)
