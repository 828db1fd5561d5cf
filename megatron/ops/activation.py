"""Activations of the MLP."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def gelu(x: Tensor, *, tanh: bool) -> Tensor:
    """GELU, any shape, exact or in its tanh form."""
    return F.gelu(x, approximate="tanh" if tanh else "none")


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) · up, where the last axis of x holds gate and then up: [..., 2f] to [..., f]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up
