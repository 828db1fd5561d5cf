"""Rotary position embedding (arXiv 2104.09864), in the halves layout of Megatron-LM and Hugging Face."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# Scales the frequencies of the channels, which follow from the base; also returns a factor of cosine and sine.
RopeScaling = Callable[[Tensor, float], tuple[Tensor, float]]


def rotary_angles(
    position_ids_bs: Tensor, channels: int, base: float, scaling: RopeScaling | None = None
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angle of every position and channel, each fp32 [b, 1, s, channels]."""
    exponents = torch.arange(0, channels, 2, device=position_ids_bs.device, dtype=torch.float32) / channels
    frequencies, factor = base**-exponents, 1.0
    if scaling is not None:
        frequencies, factor = scaling(frequencies, base)
    angles = position_ids_bs.float().unsqueeze(-1) * frequencies
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)
    return angles.cos() * factor, angles.sin() * factor


def apply_rotary_emb(x_bnsd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first `cos.shape[-1]` channels of each head, channel i together with channel i + half."""
    rotated, passed = x_bnsd.split((cos.shape[-1], x_bnsd.shape[-1] - cos.shape[-1]), dim=-1)
    low, high = rotated.float().chunk(2, dim=-1)
    rotated = rotated.float() * cos + torch.cat((-high, low), dim=-1) * sin
    return torch.cat((rotated.to(x_bnsd.dtype), passed), dim=-1)
