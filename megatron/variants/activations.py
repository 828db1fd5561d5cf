"""Activations of the MLP besides GELU. The gated forms map the halves of x, gate and up, [..., 2f] to [..., f].

Each has a plain form, and two functions for `compiled_activation`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.ops.activation import COMPILED


def relu(x: Tensor) -> Tensor:
    """max(x, 0)."""
    return x.relu()


def relu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """Gradient of `relu`."""
    return grad * (x > 0)


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) · up."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def fused_swiglu(x: Tensor) -> Tensor:
    """`swiglu` in fp32."""
    gate, up = x.float().chunk(2, dim=-1)
    return (gate / (1 + (-gate).exp()) * up).to(x.dtype)


def fused_swiglu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """Gradient of `swiglu`."""
    gate, up = x.float().chunk(2, dim=-1)
    g = grad.float()
    s = 1 / (1 + (-gate).exp())
    d_gate = g * up * s * (1 + gate * (1 - s))
    return torch.cat((d_gate, g * gate * s), dim=-1).to(x.dtype)


def geglu(x: Tensor, approximate: str = "none") -> Tensor:
    """gelu(gate) · up (arXiv 2002.05202)."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate=approximate) * up


def fused_geglu(x: Tensor, gelu: Callable[[Tensor], Tensor]) -> Tensor:
    """`geglu` in fp32."""
    gate, up = x.float().chunk(2, dim=-1)
    return (gelu(gate) * up).to(x.dtype)


def fused_geglu_backward(
    grad: Tensor, x: Tensor, gelu: Callable[[Tensor], Tensor], backward: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Gradient of `geglu`; `backward` is that of `gelu`."""
    gate, up = x.float().chunk(2, dim=-1)
    g = grad.float()
    return torch.cat((backward(g * up, gate), g * gelu(gate)), dim=-1).to(x.dtype)


def compiled_geglu(name: str) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """The two functions of `geglu` with the GELU called `name`."""
    gelu, backward = COMPILED[name]
    return (
        functools.partial(fused_geglu, gelu=gelu),
        functools.partial(fused_geglu_backward, gelu=gelu, backward=backward),
    )
