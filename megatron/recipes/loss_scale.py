"""Loss scale of fp16 training (--fp16)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.optim.step_skipper import Decision, StepRule
from megatron.parallel.mesh import Mesh
from megatron.recipes.config import LossScaleConfig
from megatron.training.config import RunConfig

# Growth ends here even if all gradients are zero: an infinite scale could never decrease again.
MAX_SCALE = 2.0**126


def make_loss_scaler(config: RunConfig, mesh: Mesh) -> LossScaler | None:
    """The loss scaler of a run, if it is in fp16."""
    return LossScaler(config.plugin(LossScaleConfig), mesh.device) if config.training.fp16 else None


class LossScaler(StepRule):
    """Multiplies the loss, and thus all gradients, so that small gradients survive fp16 (arXiv 1710.03740 section 3.2).

    The scale is that of `--loss-scale`, or it is dynamic: it doubles after `--loss-scale-window` steps without an
    overflow, and halves with each overflow from the `--hysteresis`-th since it last doubled, down to
    `--min-loss-scale`. All state is on the device, and so are all decisions.

    Attributes:
        loss_scale: fp32 scalar.
        clean: int32 scalar, steps since the last overflow or growth.
        patience: int32 scalar, overflows until the scale halves; 0 after it has halved, until it grows.
    """

    name = "loss_scaler"

    def __init__(self, config: LossScaleConfig, device: torch.device) -> None:
        fixed = config.loss_scale
        self.fixed = fixed is not None
        self.minimum = config.min_loss_scale if fixed is None else fixed
        self.window, self.hysteresis = config.loss_scale_window, config.hysteresis
        initial = config.initial_loss_scale if fixed is None else fixed
        self.loss_scale: Tensor = torch.tensor(initial, dtype=torch.float32, device=device)
        self.clean = torch.zeros((), dtype=torch.int32, device=device)
        self.patience = torch.full((), self.hysteresis, dtype=torch.int32, device=device)

    def excuse(self) -> Tensor:
        """Excuse an overflow while the scale is above its minimum, since a smaller one may prevent it."""
        return self.loss_scale > self.minimum

    def judge(self, decision: Decision) -> None:
        """Adjust the scale.

        Reports "overflow", 1 if a smaller scale may help, and "loss scale", that of the next step.
        """
        overflow, excused = ~decision.grad_norm.isfinite(), self.excuse()
        self.update(overflow, hold=decision.halted.bool())
        decision.stats |= {"overflow": (overflow & excused).float(), "loss scale": self.loss_scale}

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
        smaller = (self.loss_scale / 2).clamp(min=self.minimum)
        scale = torch.where(overflow & (patience == 0), smaller, self.loss_scale)
        scale = torch.where(grows, (2 * scale).clamp(max=MAX_SCALE), scale)
        self.loss_scale = torch.where(hold, self.loss_scale, scale)
        self.clean = torch.where(hold, self.clean, clean.masked_fill(grows, 0))
        self.patience = torch.where(hold, self.patience, patience.masked_fill(grows, self.hysteresis))

    def state(self) -> dict[str, float | int] | None:
        """State as JSON values; None if the scale is fixed. Waits for the device."""
        if self.fixed:
            return None
        return {
            "scale": self.loss_scale.item(),
            "clean": self.clean.item(),
            "patience": self.patience.item(),
        }

    def load(self, state: dict[str, float | int]) -> None:
        """Continue with the state of a checkpoint, unless the scale is fixed."""
        if not self.fixed:
            self.loss_scale.fill_(max(state["scale"], self.minimum))
            self.clean.fill_(state["clean"])
            self.patience.fill_(state["patience"])

    def is_state(self, value: Any) -> bool:
        return (
            isinstance(value, dict)
            and value.keys() == {"scale", "clean", "patience"}
            and type(value["scale"]) in (int, float)
            and 0 < value["scale"] <= MAX_SCALE
            and all(type(value[name]) is int and 0 <= value[name] < 2**31 for name in ("clean", "patience"))
        )
