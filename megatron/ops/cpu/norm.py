"""LayerNorm and RMSNorm as two compiled functions with one pass over memory each; uncompiled LayerNorm in 16 bits.

Shapes in names: r rows, h features.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.ops.compiler import CompileFn

# Most partial sums of a weight gradient: compiled code computes these in parallel.
MAX_PARTIAL_SUMS = 64


def compiled_layer_norm(run: CompileFn, x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """`layer_norm` by two functions that `run` calls."""
    if x.numel() == 0:
        return F.layer_norm(x, weight.shape, weight.to(x.dtype), bias.to(x.dtype), epsilon)
    return _Norm.apply(run, _layer_norm, _layer_norm_backward, epsilon, x, weight, bias)


def compiled_rms_norm(run: CompileFn, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """`rms_norm` by two functions that `run` calls."""
    if x.numel() == 0:
        return F.rms_norm(x, weight.shape, weight.to(x.dtype), epsilon)
    return _Norm.apply(run, _rms_norm, _rms_norm_backward, epsilon, x, weight)


def half_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """`layer_norm` in 16 bits, not compiled, with backward in fp32.

    Torch's kernel sums the gradients of weight and bias over rows in 16 bits: a sum of ones ends at 256 in bf16, at
    2,048 in fp16.
    """
    return _HalfLayerNorm.apply(x, weight, bias, epsilon)


class _HalfLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
        out, *statistics = torch.native_layer_norm(x, weight.shape, weight.float(), bias.float(), epsilon)
        ctx.save_for_backward(x, weight, bias, *statistics)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, *statistics = ctx.saved_tensors
        grad_x, *sums = torch.ops.aten.native_layer_norm_backward(
            grad.float(), x.float(), weight.shape, *statistics, weight.float(), bias.float(), [True] * 3
        )
        return grad_x.to(x.dtype), *(total.to(weight.dtype) for total in sums), None


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        run: CompileFn,
        forward: Callable,
        backward: Callable,
        epsilon: float,
        x: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        x_rh = x.reshape(-1, x.shape[-1])
        out_rh, *statistics = run(forward, x_rh, *weights, epsilon)
        ctx.run, ctx.backward_fn = run, backward
        ctx.save_for_backward(x_rh, weights[0], *statistics)
        return out_rh.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_rh, weight, *statistics = ctx.saved_tensors
        parts = math.gcd(len(x_rh), MAX_PARTIAL_SUMS)
        grad_x, *sums = ctx.run(ctx.backward_fn, grad.reshape(x_rh.shape), x_rh, weight, *statistics, parts)
        return None, None, None, None, grad_x.view(grad.shape), *(x.sum(0).to(weight.dtype) for x in sums)


def _layer_norm(x_rh: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    x = x_rh.float()
    mean_r1 = x.mean(-1, keepdim=True)
    x = x - mean_r1
    inverse_r1 = (x.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return (x * inverse_r1 * weight.float() + bias.float()).to(x_rh.dtype), mean_r1, inverse_r1


def _layer_norm_backward(
    grad_rh: Tensor, x_rh: Tensor, weight: Tensor, mean_r1: Tensor, inverse_r1: Tensor, parts: int
) -> tuple[Tensor, Tensor, Tensor]:
    grad, normed = grad_rh.float(), (x_rh.float() - mean_r1) * inverse_r1
    scaled = grad * weight.float()
    along = scaled.mean(-1, keepdim=True) + normed * (scaled * normed).mean(-1, keepdim=True)
    grad_x = ((scaled - along) * inverse_r1).to(x_rh.dtype)
    return grad_x, _partial_sums(grad * normed, parts), _partial_sums(grad, parts)


def _rms_norm(x_rh: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    x = x_rh.float()
    inverse_r1 = (x.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return (x * inverse_r1 * weight.float()).to(x_rh.dtype), inverse_r1


def _rms_norm_backward(
    grad_rh: Tensor, x_rh: Tensor, weight: Tensor, inverse_r1: Tensor, parts: int
) -> tuple[Tensor, Tensor]:
    grad, normed = grad_rh.float(), x_rh.float() * inverse_r1
    scaled = grad * weight.float()
    along = normed * (scaled * normed).mean(-1, keepdim=True)
    return ((scaled - along) * inverse_r1).to(x_rh.dtype), _partial_sums(grad * normed, parts)


def _partial_sums(x_rh: Tensor, parts: int) -> Tensor:
    """Sums over `parts` runs of rows, [parts, h]."""
    return x_rh.unflatten(0, (parts, -1)).sum(1)
