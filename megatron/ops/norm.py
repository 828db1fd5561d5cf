"""Normalisation over the last axis. Statistics are taken in fp32 whatever the dtype of the input, which the output has.

Weights may be of less precision than the input, as with a residual stream in fp32. The kernels of apex and Transformer
Engine take no empty input, which a replica may have at the end of an evaluation.
"""

from __future__ import annotations

import importlib.metadata
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.ops.compiler import Run

# In how many parts, at most, compiled code sums rows up for the gradient of a weight: it can run them side by side.
PARTS = 64


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """(x - mean) / √(variance + ε) · weight + bias; x [..., h], weight and bias [h]."""
    return F.layer_norm(x, weight.shape, weight.to(x.dtype), bias.to(x.dtype), epsilon)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x / √(mean(x²) + ε) · weight; x [..., h], weight [h]."""
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), epsilon)


def compiled_layer_norm(run: Run, x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """`layer_norm` by two functions that `run` runs."""
    if x.numel() == 0:
        return layer_norm(x, weight, bias, epsilon)
    return _Norm.apply(run, _layer_norm, _layer_norm_backward, epsilon, x, weight, bias)


def compiled_rms_norm(run: Run, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """`rms_norm` by two functions that `run` runs."""
    if x.numel() == 0:
        return rms_norm(x, weight, epsilon)
    return _Norm.apply(run, _rms_norm, _rms_norm_backward, epsilon, x, weight)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run: Run, formula, gradient, epsilon: float, x: Tensor, *weights: Tensor) -> Tensor:
        x_rh = x.reshape(-1, x.shape[-1])
        out_rh, *statistics = run(formula, x_rh, *weights, epsilon)
        ctx.run, ctx.gradient = run, gradient
        ctx.save_for_backward(x_rh, weights[0], *statistics)
        return out_rh.view(x.shape)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_rh, weight, *statistics = ctx.saved_tensors
        parts = math.gcd(len(x_rh), PARTS)
        grad_x, *sums = ctx.run(ctx.gradient, grad.reshape(x_rh.shape), x_rh, weight, *statistics, parts)
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
    return grad_x, _sums(grad * normed, parts), _sums(grad, parts)


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
    return ((scaled - along) * inverse_r1).to(x_rh.dtype), _sums(grad * normed, parts)


def _sums(x_rh: Tensor, parts: int) -> Tensor:
    """[parts, h], each of the rows that lie together."""
    return x_rh.unflatten(0, (parts, -1)).sum(1)


def apex_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """`layer_norm` by NVIDIA's apex."""
    if x.numel() == 0:
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
    """Whether apex is installed, with its CUDA extensions."""
    try:
        import fused_layer_norm_cuda  # noqa: F401
        from apex.normalization import fused_layer_norm  # noqa: F401
    except ImportError:
        return False
    return True


def te_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """`layer_norm` by NVIDIA's Transformer Engine."""
    if x.numel() == 0:
        return layer_norm(x, weight, bias, epsilon)
    return _TELayerNorm.apply(x, weight.to(x.dtype), bias.to(x.dtype), epsilon)


def te_rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """`rms_norm` by NVIDIA's Transformer Engine."""
    if x.numel() == 0:
        return rms_norm(x, weight, epsilon)
    return _TERMSNorm.apply(x, weight.to(x.dtype), epsilon)


# Transformer Engine's modules own their weights, which here lie in flat memory: these call the functions below its
# modules, the same since 2.0. Their last arguments: how many multiprocessors to leave to others, and
# whether weights are stored less 1.
_PLAIN = (0, False)


class _TELayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
        from transformer_engine.pytorch.constants import TE_DType
        from transformer_engine_torch import layernorm_fwd

        flat = x.contiguous().view(-1, x.shape[-1])
        out, mean, inverse = layernorm_fwd(
            flat, weight, bias, epsilon, None, None, TE_DType[x.dtype], *_PLAIN
        )
        ctx.save_for_backward(flat, mean, inverse, weight)
        return out.view(x.shape)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        from transformer_engine_torch import layernorm_bwd

        flat, mean, inverse, weight = ctx.saved_tensors
        grad_x, grad_weight, grad_bias = layernorm_bwd(
            grad.reshape(flat.shape), flat, mean, inverse, weight, *_PLAIN
        )
        return grad_x.view(grad.shape), grad_weight, grad_bias, None


class _TERMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        from transformer_engine.pytorch.constants import TE_DType
        from transformer_engine_torch import rmsnorm_fwd

        flat = x.contiguous().view(-1, x.shape[-1])
        out, _, inverse = rmsnorm_fwd(flat, weight, epsilon, None, None, TE_DType[x.dtype], *_PLAIN)
        ctx.save_for_backward(flat, inverse, weight)
        return out.view(x.shape)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        from transformer_engine_torch import rmsnorm_bwd

        flat, inverse, weight = ctx.saved_tensors
        grad_x, grad_weight = rmsnorm_bwd(grad.reshape(flat.shape), flat, inverse, weight, *_PLAIN)
        return grad_x.view(grad.shape), grad_weight, None


def te_fault() -> str | None:
    """Why Transformer Engine cannot be used here, in a line; None if it can. Imports it, which takes seconds."""
    try:
        version = importlib.metadata.version("transformer-engine")
        import transformer_engine.pytorch  # noqa: F401
    except importlib.metadata.PackageNotFoundError:
        return "it is not installed"
    except Exception as error:  # of many kinds, where its parts do not fit each other, CUDA or torch
        return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    return f"it is of version {version}, and has to be of 2.0 or later" if version.startswith("1.") else None
