"""Rotary position embedding (arXiv 2104.09864), in the halves layout of Megatron-LM and Hugging Face."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megatron.ops.compiler import CompileFn

# Llama 3's scaling.
TRAINED_LENGTH, LEAST_TURNS, MOST_TURNS = 8192, 1.0, 4.0


def rotary_angles(
    position_ids_bs: Tensor, channels: int, base: float, scaling: float | None = None
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angle of every position and channel, each fp32 [b, 1, s, channels].

    Args:
        scaling: factor by which the lowest frequencies are divided; None for no scaling.
    """
    exponents = torch.arange(0, channels, 2, device=position_ids_bs.device, dtype=torch.float32) / channels
    frequencies = base**-exponents
    if scaling is not None:
        frequencies = scale_rope_freqs(frequencies, scaling)
    angles = position_ids_bs.float().unsqueeze(-1) * frequencies
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)
    return angles.cos(), angles.sin()


def scale_rope_freqs(frequencies: Tensor, factor: float) -> Tensor:
    """Scale frequencies to sequences longer than those trained on, as Llama 3.1 does (arXiv 2407.21783 section 3.4.2).

    Frequencies with at least `MOST_TURNS` turns over the trained length distinguish near positions and are kept. Those
    with less than one turn are divided by `factor`. Those between are interpolated.
    """
    turns = frequencies * (TRAINED_LENGTH / (2 * math.pi))
    kept = ((turns - LEAST_TURNS) / (MOST_TURNS - LEAST_TURNS)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / factor)


def apply_rotary_emb(x_bnsd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first `cos.shape[-1]` channels of each head, channel i together with channel i + half."""
    rotated, passed = x_bnsd.split((cos.shape[-1], x_bnsd.shape[-1] - cos.shape[-1]), dim=-1)
    low, high = rotated.float().chunk(2, dim=-1)
    rotated = rotated.float() * cos + torch.cat((-high, low), dim=-1) * sin
    return torch.cat((rotated.to(x_bnsd.dtype), passed), dim=-1)


def compiled_rotary_emb(run: CompileFn, x_bnsd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`apply_rotary_emb` by a function that `run` calls."""
    return _Rotation.apply(x_bnsd, cos, sin, run)


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_bnsd: Tensor, cos: Tensor, sin: Tensor, run: CompileFn) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(cos, sin)
        return run(apply_rotary_emb, x_bnsd, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        # The transpose of a rotation is the rotation back.
        cos, sin = ctx.saved_tensors
        return ctx.run(apply_rotary_emb, grad, cos, -sin), None, None, None
