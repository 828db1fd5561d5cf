"""Activations as two compiled functions, the value and the gradient from grad and x.

They save only their input; backward recomputes the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron.ops.activation import ACTIVATIONS
from megatron.ops.compiler import LOG2_E, CompileFn
from megatron.ops.cpu.fused import fused

SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
CUBIC = 0.044715


def compiled_activation(run: CompileFn, x: Tensor, name: str) -> Tensor:
    """`activation` by two functions that `run` calls: those of `PAIRS`, or else what autograd derives."""
    if name in PAIRS:
        return _Pointwise.apply(x, run, *PAIRS[name])
    return fused(run, ACTIVATIONS[name], x)


class _Pointwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, run: CompileFn, forward: Callable, backward: Callable) -> Tensor:
        ctx.run, ctx.backward_fn = run, backward
        ctx.save_for_backward(x)
        out = run(forward, x.flatten(0, -2))
        return out.view(*x.shape[:-1], out.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (x,) = ctx.saved_tensors
        dx = ctx.run(ctx.backward_fn, grad.flatten(0, -2), x.flatten(0, -2))
        return dx.view(x.shape), None, None, None


# In the tanh form, u = √(2/π) (y + 0.044715 y³), and -2u log₂ e = y (LINEAR + CUBED y²).
LINEAR = -2 * SQRT_2_OVER_PI * LOG2_E
CUBED = LINEAR * CUBIC


def _gelu_tanh(x: Tensor) -> Tensor:
    # (1 + tanh u) / 2 is 1 / (1 + exp -2u).
    y = x.float()
    return (y / (1 + torch.exp2(y * (LINEAR + CUBED * y * y)))).to(x.dtype)


def _gelu_tanh_backward(grad: Tensor, x: Tensor) -> Tensor:
    y = x.float()
    y2 = y * y
    s = 1 / (1 + torch.exp2(y * (LINEAR + CUBED * y2)))
    # y s comes first: it is 0 where y² overflows.
    slope = s + y * s * (1 - s) * (2 * SQRT_2_OVER_PI) * (1 + 3 * CUBIC * y2)
    return (grad.float() * slope).to(x.dtype)


def _gelu_erf(x: Tensor) -> Tensor:
    y = x.float()
    return (0.5 * y * (1 + torch.erf(y * math.sqrt(0.5)))).to(x.dtype)


def _gelu_erf_backward(grad: Tensor, x: Tensor) -> Tensor:
    y = x.float()
    slope = 0.5 * (1 + torch.erf(y * math.sqrt(0.5))) + y * (-0.5 * y * y).exp() / math.sqrt(2 * math.pi)
    return (grad.float() * slope).to(x.dtype)


def _swiglu(x: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    return (gate / (1 + (-gate).exp()) * up).to(x.dtype)


def _swiglu_backward(grad: Tensor, x: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    g = grad.float()
    s = 1 / (1 + (-gate).exp())
    d_gate = g * up * s * (1 + gate * (1 - s))
    return torch.cat((d_gate, g * gate * s), dim=-1).to(x.dtype)


PAIRS = {
    "gelu": (_gelu_erf, _gelu_erf_backward),
    "gelu_tanh": (_gelu_tanh, _gelu_tanh_backward),
    "swiglu": (_swiglu, _swiglu_backward),
}
