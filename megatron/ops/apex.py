"""LayerNorm and RMSNorm by NVIDIA's apex (--ops-backend apex)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.errors import InputError
from megatron.ops.norm import layer_norm, rms_norm


def apex_ops(device: torch.device) -> dict[str, Any]:
    """Fields of `Ops` that apex computes.

    Raises:
        InputError: the device is no GPU, or apex is not installed.
    """
    if device.type != "cuda":
        raise InputError("--ops-backend apex: apex needs a GPU; use --ops-backend auto")
    if not has_apex():
        raise InputError(
            "--ops-backend apex: apex is not installed with its CUDA extensions; install it from "
            "https://github.com/NVIDIA/apex (it is not on PyPI), or use --ops-backend auto"
        )
    return {"layer_norm": apex_layer_norm, "rms_norm": apex_rms_norm}


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
