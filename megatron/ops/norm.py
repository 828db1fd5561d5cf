"""Normalisation over the last axis. Statistics are taken in fp32 whatever the dtype of the input."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """(x - mean) / √(variance + ε) · weight + bias; x [..., h], weight and bias [h]."""
    return F.layer_norm(x, weight.shape, weight, bias, epsilon)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x / √(mean(x²) + ε) · weight; x [..., h], weight [h]."""
    return F.rms_norm(x, weight.shape, weight, epsilon)
