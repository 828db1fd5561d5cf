"""LayerNorm and RMSNorm over the last dimension, with statistics in fp32. The output has the dtype of the input.

Weights may have less precision than the input, as with a residual stream in fp32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.ops.cpu import norm as cpu


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """(x - mean) / √(variance + ε) · weight + bias; x [..., h], weight and bias [h]."""
    if x.device.type == "cpu" and x.dtype in (torch.float16, torch.bfloat16):
        return cpu.half_layer_norm(x, weight, bias, epsilon)
    return F.layer_norm(x, weight.shape, weight.to(x.dtype), bias.to(x.dtype), epsilon)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x / √(mean(x²) + ε) · weight; x [..., h], weight [h]."""
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), epsilon)
