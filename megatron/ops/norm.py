"""Normalisation over the last axis. Statistics are taken in fp32 whatever the dtype of the input, which the output has.

Weights may be of less precision than the input, as with a residual stream in fp32.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """(x - mean) / √(variance + ε) · weight + bias; x [..., h], weight and bias [h]."""
    return F.layer_norm(x, weight.shape, weight.to(x.dtype), bias.to(x.dtype), epsilon)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x / √(mean(x²) + ε) · weight; x [..., h], weight [h]."""
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), epsilon)


def apex_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """`layer_norm` by NVIDIA's apex."""
    from apex.normalization.fused_layer_norm import fused_layer_norm_affine

    return fused_layer_norm_affine(x, weight.to(x.dtype), bias.to(x.dtype), weight.shape, epsilon)


def apex_rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """`rms_norm` by NVIDIA's apex."""
    from apex.normalization.fused_layer_norm import fused_rms_norm_affine

    return fused_rms_norm_affine(x, weight.to(x.dtype), weight.shape, epsilon)


def has_apex() -> bool:
    """Whether apex is installed, with its CUDA extensions."""
    try:
        import fused_layer_norm_cuda  # noqa: F401
        from apex.normalization import fused_layer_norm  # noqa: F401
    except ImportError:
        return False
    return True
