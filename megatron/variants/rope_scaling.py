"""Scaling of RoPE's frequencies for sequences longer than those trained on."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from megatron.errors import InputError
from megatron.model.config import ModelConfig

# Turns over the trained length up to which a frequency is divided, and from which on it is kept, by default.
TURNS = {"llama3": (1.0, 4.0), "yarn": (1.0, 32.0)}


def check_turns(turns: tuple[float, ...] | None) -> None:
    """Raise `InputError` if the turns of --rope-scaling-turns are out of order."""
    if turns is not None and turns[0] > turns[1]:
        raise InputError(
            f"--rope-scaling-turns: {turns[0]} {turns[1]}: the first is larger than the second; swap them"
        )


def yarn_mscale(factor: float, weight: float = 1.0) -> float:
    """Square root of YaRN's inverse temperature of the attention scores (arXiv 2309.00071 equation 22)."""
    return 1 + 0.1 * weight * math.log(factor)


@dataclasses.dataclass(frozen=True)
class Scaling:
    """Frequencies for sequences longer than the `length` trained on.

    Those of many turns distinguish near positions and are kept, those of few are divided by `factor`, those between are
    interpolated: linearly in the turns ("llama3", arXiv 2407.21783 section 3.4.2) or in the channel ("yarn", arXiv
    2309.00071, whose code rounds the channels where the ramp begins and ends outwards). "linear" divides all (arXiv
    2306.15595).
    """

    kind: str
    factor: float
    length: int
    turns: tuple[float, ...] | None = None
    given_attention_factor: float | None = None
    rounded: bool = True

    def __call__(self, frequencies: Tensor, base: float) -> tuple[Tensor, float]:
        """The scaled frequencies, and the factor of cosine and sine."""
        return self.scaled(frequencies, base), self.attention_factor

    def scaled(self, frequencies: Tensor, base: float) -> Tensor:
        """Scale the frequencies of the channels, which follow from `base`."""
        if self.kind == "linear":
            return frequencies / self.factor
        (low, high), turns = self.turns or TURNS[self.kind], self.length / (2 * math.pi)
        x = frequencies * turns
        if self.kind == "yarn":
            count = len(frequencies)
            x = torch.arange(count, dtype=torch.float32, device=x.device)
            low, high = (count * math.log(turns / limit, base) for limit in (low, high))
            if self.rounded:
                low, high = math.ceil(low), math.floor(high)
            low, high = min(low, 2 * count - 1), max(high, 0)
        # With equal turns the ramp is a step: up over channels (yarn), down over turns (llama3).
        step = 0.001 if self.kind == "yarn" else -0.001
        divided = ((x - high) / ((low - high) or step)).clamp(0, 1)
        return frequencies * (1 - divided + divided / self.factor)

    @classmethod
    def from_config(cls, config: ModelConfig) -> Scaling:
        """The scaling of --use-rope-scaling. Raises `InputError` for turns that are out of order or have no meaning."""
        if config.rope_scaling_type == "linear" and config.rope_scaling_turns is not None:
            raise InputError(
                "--rope-scaling-turns has no meaning with --rope-scaling-type linear; leave it out"
            )
        if config.rope_scaling_type != "yarn" and config.rope_scaling_attention_factor is not None:
            factor = config.rope_scaling_attention_factor
            raise InputError(f"--rope-scaling-attention-factor: {factor} needs --rope-scaling-type yarn")
        if config.rope_scaling_type != "yarn" and not config.yarn_correction_range_round_to_int:
            raise InputError("--no-yarn-correction-range-round-to-int needs --rope-scaling-type yarn")
        check_turns(config.rope_scaling_turns)
        factor, given = config.rope_scaling_factor, config.rope_scaling_attention_factor
        if config.multi_latent_attention and config.rope_scaling_type == "yarn" and given is None:
            given = yarn_mscale(factor, config.mscale) / yarn_mscale(factor, config.mscale_all_dim)
        return cls(
            config.rope_scaling_type,
            factor,
            config.rope_scaling_original_length,
            config.rope_scaling_turns,
            given,
            config.yarn_correction_range_round_to_int,
        )

    @property
    def attention_factor(self) -> float:
        """Factor of cosine and sine, by which YaRN sharpens attention."""
        if self.given_attention_factor is not None:
            return self.given_attention_factor
        return yarn_mscale(self.factor) if self.kind == "yarn" else 1.0


ROPE_SCALINGS = dict.fromkeys(("llama3", "linear", "yarn"), Scaling.from_config)
