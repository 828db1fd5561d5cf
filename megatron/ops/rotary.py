"""Rotary position embedding (arXiv 2104.09864), in the halves layout of Megatron-LM and Hugging Face."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron.ops.compiler import Run

# Of Llama 3's scaling.
TRAINED_LENGTH, LEAST_TURNS, MOST_TURNS = 8192, 1.0, 4.0


def rotary_angles(
    position_ids_bs: Tensor, channels: int, base: float, scaling: float | None = None
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angle of every position and channel: two fp32 [b, 1, s, channels].

    Args:
        scaling: how many times slower the slowest frequencies become; None leaves all as they are.
    """
    exponents = torch.arange(0, channels, 2, device=position_ids_bs.device, dtype=torch.float32) / channels
    frequencies = base**-exponents
    if scaling is not None:
        frequencies = slowed_down(frequencies, scaling)
    angles = position_ids_bs.float().unsqueeze(-1) * frequencies
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)
    return angles.cos(), angles.sin()


def slowed_down(frequencies: Tensor, factor: float) -> Tensor:
    """Frequencies for longer sequences than trained on, as Llama 3.1 has them (arXiv 2407.21783 section 3.4.2).

    What turns at least `MOST_TURNS` times over the trained length tells near positions apart, and is kept; what does
    not turn once becomes `factor` times slower; those between are a mean of both.
    """
    turns = frequencies * (TRAINED_LENGTH / (2 * math.pi))
    kept = ((turns - LEAST_TURNS) / (MOST_TURNS - LEAST_TURNS)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / factor)


def rotate(x_bnsd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first `cos.shape[-1]` channels of each head; channel i turns together with i + half."""
    turned, passed = x_bnsd.split((cos.shape[-1], x_bnsd.shape[-1] - cos.shape[-1]), dim=-1)
    low, high = turned.float().chunk(2, dim=-1)
    turned = turned.float() * cos + torch.cat((-high, low), dim=-1) * sin
    return torch.cat((turned.to(x_bnsd.dtype), passed), dim=-1)


def compiled_rotate(run: Run, x_bnsd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rotate` by a function that `run` runs."""
    return _Rotation.apply(x_bnsd, cos, sin, run)


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_bnsd: Tensor, cos: Tensor, sin: Tensor, run: Run) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(cos, sin)
        return run(rotate, x_bnsd, cos, sin)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        # What was turned is turned back.
        cos, sin = ctx.saved_tensors
        return ctx.run(rotate, grad, cos, -sin), None, None, None
