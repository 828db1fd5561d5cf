"""Activations of the MLP besides GELU and SwiGLU."""

from __future__ import annotations

from torch import Tensor


def relu(x: Tensor) -> Tensor:
    """max(x, 0)."""
    return x.relu()


def relu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """Gradient of `relu`."""
    return grad * (x > 0)
