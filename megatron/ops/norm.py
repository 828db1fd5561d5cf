"""LayerNorm and RMSNorm over the last dimension, with statistics in fp32. The output has the dtype of the input.

Weights may have less precision than the input, as with a residual stream in fp32.
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
    if x.numel() == 0:  # a replica at the end of an evaluation; apex takes no empty input
        return layer_norm(x, weight, bias, epsilon)
    from apex.normalization.fused_layer_norm import fused_layer_norm_affine

    return fused_layer_norm_affine(x, weight.to(x.dtype), bias.to(x.dtype), weight.shape, epsilon)


def apex_rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """`rms_norm` by NVIDIA's apex."""
    if x.numel() == 0:
        return rms_norm(x, weight, epsilon)
    from apex.normalization.fused_layer_norm import fused_rms_norm_affine

    return fused_rms_norm_affine(x, weight.to(x.dtype), weight.shape, epsilon)


def has_apex() -> bool:
    """True if apex is installed with its CUDA extensions."""
    try:
        import fused_layer_norm_cuda  # noqa: F401
        from apex.normalization import fused_layer_norm  # noqa: F401
    except ImportError:
        return False
    return True
