"""Activations of the MLP besides GELU. The gated forms map the halves of x, gate and up, [..., 2f] to [..., f]."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def relu(x: Tensor) -> Tensor:
    """max(x, 0)."""
    return x.relu()


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) · up."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def geglu(x: Tensor) -> Tensor:
    """gelu(gate) · up (arXiv 2002.05202)."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate) * up


def geglu_tanh(x: Tensor) -> Tensor:
    """`geglu` with the approximation of GELU by tanh, as in Gemma."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


ACTIVATIONS = {"relu": relu, "swiglu": swiglu, "geglu": geglu, "geglu_tanh": geglu_tanh}
