"""Rotary position embedding (arXiv 2104.09864), in the halves layout of Megatron-LM and Hugging Face."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from megatron.ops.compiler import CompileFn

# Turns over the trained length up to which a frequency is divided, and from which on it is kept.
TURNS = {"llama3": (1.0, 4.0), "yarn": (1.0, 32.0)}


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Frequencies for sequences longer than the `length` trained on.

    Those of many turns distinguish near positions and are kept, those of few are divided by `factor`, those between are
    interpolated: linearly in the turns ("llama3", arXiv 2407.21783 section 3.4.2) or in the channel ("yarn", arXiv
    2309.00071). "linear" divides all (arXiv 2306.15595).
    """

    kind: str
    factor: float
    length: int

    def __call__(self, frequencies: Tensor, base: float) -> Tensor:
        if self.kind == "linear":
            return frequencies / self.factor
        (low, high), turns = TURNS[self.kind], self.length / (2 * math.pi)
        x = frequencies * turns
        if self.kind == "yarn":
            count = len(frequencies)
            x = torch.arange(count, dtype=torch.float32, device=x.device)
            low = min(math.ceil(count * math.log(turns / low, base)), 2 * count - 1)
            high = max(math.floor(count * math.log(turns / high, base)), 0)
        divided = ((x - high) / ((low - high) or 0.001)).clamp(0, 1)
        return frequencies * (1 - divided + divided / self.factor)

    @property
    def attention_factor(self) -> float:
        """Factor of cosine and sine, by which YaRN sharpens attention."""
        return 1 + 0.1 * math.log(self.factor) if self.kind == "yarn" else 1.0


def rotary_angles(
    position_ids_bs: Tensor, channels: int, base: float, scaling: RopeScaling | None = None
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angle of every position and channel, each fp32 [b, 1, s, channels]."""
    exponents = torch.arange(0, channels, 2, device=position_ids_bs.device, dtype=torch.float32) / channels
    frequencies = base**-exponents
    if scaling is not None:
        frequencies = scaling(frequencies, base)
    angles = position_ids_bs.float().unsqueeze(-1) * frequencies
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)
    factor = 1.0 if scaling is None else scaling.attention_factor
    return angles.cos() * factor, angles.sin() * factor


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
