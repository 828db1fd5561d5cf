"""Rotary position embedding (arXiv 2104.09864), in the halves layout of Megatron-LM and Hugging Face."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_angles(position_ids_bs: Tensor, channels: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angle of every position and channel: two fp32 [b, 1, s, channels]."""
    exponents = torch.arange(0, channels, 2, device=position_ids_bs.device, dtype=torch.float32) / channels
    angles = position_ids_bs.float().unsqueeze(-1) * base**-exponents
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)
    return angles.cos(), angles.sin()


def rotate(x_bnsd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first `cos.shape[-1]` channels of each head; channel i turns together with i + half."""
    turned, passed = x_bnsd.split((cos.shape[-1], x_bnsd.shape[-1] - cos.shape[-1]), dim=-1)
    low, high = turned.float().chunk(2, dim=-1)
    turned = turned.float() * cos + torch.cat((-high, low), dim=-1) * sin
    return torch.cat((turned.to(x_bnsd.dtype), passed), dim=-1)
