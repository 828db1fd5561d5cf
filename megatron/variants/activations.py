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


def quick_geglu(x: Tensor) -> Tensor:
    """gate · sigmoid(1.702 gate) · (up + 1) with gate up to 7 and up within ±7, as in gpt-oss (arXiv 2508.10925)."""
    gate, up = x.chunk(2, dim=-1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * (1.702 * gate).sigmoid() * (up + 1)


ACTIVATIONS = {"relu": relu, "swiglu": swiglu, "geglu": geglu, "geglu_tanh": geglu_tanh}
ACTIVATIONS |= {"quick_geglu": quick_geglu}
