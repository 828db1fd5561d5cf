"""Loss scale of fp16 training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.optim.config import OptimizerConfig

# Growth ends here even if all gradients are zero: an infinite scale could never decrease again.
MAX_SCALE = 2.0**126


class LossScaler:
    """Multiplies the loss, and thus all gradients, so that small gradients survive fp16 (arXiv 1710.03740 section 3.2).

    The scale is that of `--loss-scale`, or it is dynamic: it doubles after `--loss-scale-window` steps without an
    overflow, and halves with each overflow from the `--hysteresis`-th since it last doubled, down to
    `--min-loss-scale`. All state is on the device, and so are all decisions.

    Attributes:
        scale: fp32 scalar.
        clean: int32 scalar, steps since the last overflow or growth.
        patience: int32 scalar, overflows until the scale halves; 0 after it has halved, until it grows.
    """

    def __init__(self, config: OptimizerConfig, device: torch.device) -> None:
        fixed = config.loss_scale
        self.fixed = fixed is not None
        self.minimum = config.min_loss_scale if fixed is None else fixed
        self.window, self.hysteresis = config.loss_scale_window, config.hysteresis
        initial = config.initial_loss_scale if fixed is None else fixed
        self.scale = torch.tensor(initial, dtype=torch.float32, device=device)
        self.clean = torch.zeros((), dtype=torch.int32, device=device)
        self.patience = torch.full((), self.hysteresis, dtype=torch.int32, device=device)

    def can_decrease(self) -> Tensor:
        """True, as a scalar, if the scale is above its minimum, so that a smaller one may prevent an overflow."""
        return self.scale > self.minimum

    def update(self, overflow: Tensor, hold: Tensor) -> None:
        """Adjust a dynamic scale after a step.

        Args:
            overflow: scalar, the gradients are not finite.
            hold: scalar, change nothing.
        """
        if self.fixed:
            return
        clean = (self.clean + 1).masked_fill(overflow, 0)
        patience = (self.patience - overflow.int()).clamp(min=0)
        grows = clean >= self.window
        smaller = (self.scale / 2).clamp(min=self.minimum)
        scale = torch.where(overflow & (patience == 0), smaller, self.scale)
        scale = torch.where(grows, (2 * scale).clamp(max=MAX_SCALE), scale)
        self.scale = torch.where(hold, self.scale, scale)
        self.clean = torch.where(hold, self.clean, clean.masked_fill(grows, 0))
        self.patience = torch.where(hold, self.patience, patience.masked_fill(grows, self.hysteresis))

    def state(self) -> dict[str, float | int] | None:
        """State as JSON values; None if the scale is fixed. Waits for the device."""
        if self.fixed:
            return None
        return {
            "scale": self.scale.item(),
            "clean": self.clean.item(),
            "patience": self.patience.item(),
        }

    def load(self, state: dict[str, float | int]) -> None:
        """Continue with the state of a checkpoint, unless the scale is fixed."""
        if not self.fixed:
            self.scale.fill_(max(state["scale"], self.minimum))
            self.clean.fill_(state["clean"])
            self.patience.fill_(state["patience"])


def is_state(value: Any) -> bool:
    """Check that `value` could be the return value of `LossScaler.state`, or None for a run without a scaler."""
    if value is None:
        return True
    return (
        isinstance(value, dict)
        and value.keys() == {"scale", "clean", "patience"}
        and type(value["scale"]) in (int, float)
        and 0 < value["scale"] <= MAX_SCALE
        and all(type(value[name]) is int and 0 <= value[name] < 2**31 for name in ("clean", "patience"))
    )
