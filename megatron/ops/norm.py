"""LayerNorm and RMSNorm over the last dimension, with statistics in fp32. The output has the dtype of the input.

Weights may have less precision than the input, as with a residual stream in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """(x - mean) / √(variance + ε) · weight + bias; x [..., h], weight and bias [h]."""
    if x.device.type == "cpu" and x.dtype in (torch.float16, torch.bfloat16):
        return cpu_half_layer_norm(x, weight, bias, epsilon)
    return F.layer_norm(x, weight.shape, weight.to(x.dtype), bias.to(x.dtype), epsilon)


def cpu_half_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """LayerNorm in 16 bits on a CPU. Torch's kernel sums the gradients of weight and bias over rows in 16 bits, where
    the sums stop growing after a few hundred rows; here backward is in fp32."""
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


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x / √(mean(x²) + ε) · weight; x [..., h], weight [h]."""
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), epsilon)
