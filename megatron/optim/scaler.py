"""The factor on the loss of an fp16 run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.optim.config import OptimizerConfig

# Gradients overflow long before it, unless they are zero for ages: a scale that is infinite would never fall again.
LARGEST = 2.0**126


class LossScaler:
    """Multiplies the loss, and so all gradients, that small ones are not lost in fp16 (arXiv 1710.03740 section 3.2).

    `--loss-scale` fixes the scale. Without it, it follows what gradients admit: `--loss-scale-window` steps in a row
    without an overflow double it, and make it tolerate `--hysteresis` less one overflows again; every overflow beyond
    those halves it, down to `--min-loss-scale`.

    All of it is on the device, and is decided there.

    Attributes:
        scale: fp32.
        clean: steps since the last overflow or growth, int32.
        patience: overflows until the scale falls, int32; 0 once it has fallen, until it grows.
    """

    def __init__(self, config: OptimizerConfig, device: torch.device) -> None:
        self.fixed = config.loss_scale is not None
        self.minimum = config.loss_scale if self.fixed else config.min_loss_scale
        self.window, self.hysteresis = config.loss_scale_window, config.hysteresis
        initial = config.loss_scale if self.fixed else config.initial_loss_scale
        self.scale = torch.tensor(initial, dtype=torch.float32, device=device)
        self.clean = torch.zeros((), dtype=torch.int32, device=device)
        self.patience = torch.full((), self.hysteresis, dtype=torch.int32, device=device)

    def can_fall(self) -> Tensor:
        """Whether an overflow may be the scale's fault, so that it is to be waited for a smaller one; a scalar."""
        return self.scale > self.minimum

    def update(self, overflow: Tensor, hold: Tensor) -> None:
        """Note whether a step's gradients overflowed; where `hold`, both scalars, nothing is noted."""
        if self.fixed:
            return
        clean = (self.clean + 1).masked_fill(overflow, 0)
        patience = (self.patience - overflow.int()).clamp(min=0)
        grows = clean >= self.window
        fallen = (self.scale / 2).clamp(min=self.minimum)
        scale = torch.where(overflow & (patience == 0), fallen, self.scale)
        scale = torch.where(grows, (2 * scale).clamp(max=LARGEST), scale)
        self.scale = torch.where(hold, self.scale, scale)
        self.clean = torch.where(hold, self.clean, clean.masked_fill(grows, 0))
        self.patience = torch.where(hold, self.patience, patience.masked_fill(grows, self.hysteresis))

    def state(self) -> dict[str, float | int] | None:
        """As JSON has it; None if the scale is fixed. Waits for the device."""
        if self.fixed:
            return None
        return {
            "scale": self.scale.item(),
            "clean": self.clean.item(),
            "patience": self.patience.item(),
        }

    def load(self, state: dict[str, float | int]) -> None:
        """Go on with the scale of a checkpoint, unless this run's is fixed."""
        if not self.fixed:
            self.scale.fill_(max(state["scale"], self.minimum))
            self.clean.fill_(state["clean"])
            self.patience.fill_(state["patience"])


def is_state(value: Any) -> bool:
    """Whether `value` is what `LossScaler.state` gives; None, too, where there is no scaler."""
    if value is None:
        return True
    return (
        isinstance(value, dict)
        and value.keys() == {"scale", "clean", "patience"}
        and type(value["scale"]) in (int, float)
        and 0 < value["scale"] <= LARGEST
        and all(type(value[name]) is int and 0 <= value[name] < 2**31 for name in ("clean", "patience"))
    )
