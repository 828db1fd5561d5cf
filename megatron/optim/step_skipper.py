"""Steps to skip because of gradients that are not finite, and rules of plug-ins that take part in a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor


@dataclasses.dataclass
class Decision:
    """The decision whether the optimizer steps. All tensors but `losses` are scalars, equal on every rank.

    Attributes:
        losses: this process's share of the global batch's mean losses, [terms].
        halted: 1 from the first gradient that stops the run.
        skipped: 1 to skip the step. A rule may raise it.
        stats: values of the step to report, by name. A rule may add to them.
    """

    grad_norm: Tensor
    losses: Tensor | None
    halted: Tensor
    skipped: Tensor
    stats: dict[str, Tensor]


class StepRule:
    """A plug-in's part in each step of the optimizer, which must not make the host wait for the device.

    Attributes:
        name: of its state in checkpoints.
        loss_scale: factor of the loss in backward, and so of all gradients. The step divides them by it.
    """

    name: ClassVar[str]
    loss_scale: Tensor | float = 1.0

    def excuse(self) -> Tensor | None:
        """Return a boolean scalar: true if a non-finite gradient must not stop the run. None excuses nothing."""

    def judge(self, decision: Decision) -> None:
        """Change the decision."""

    def state(self) -> Any:
        """State as JSON values; None for none. May wait for the device."""

    def is_state(self, value: Any) -> bool:
        """True if `value` could be what `state` returns, other than None."""
        return False

    def load(self, state: Any) -> None:
        """Continue with the state of a checkpoint."""


class StepSkipper:
    """Decides on the device which steps to skip, so that the host need not wait.

    A step is skipped if its gradient is not finite. With `--on-non-finite stop` all later steps are skipped too, so
    that the weights stay as they were until the host notices and stops the run.

    Attributes:
        halted: scalar, 1 from the first gradient that stops the run.
    """

    def __init__(self, rules: Sequence[StepRule], device: torch.device, *, stops: bool) -> None:
        """`stops`: a gradient that is not finite stops the run, unless a rule excuses it."""
        self.rules, self.stops = rules, stops
        self.halted = torch.zeros((), device=device)

    def decide(self, grad_norm: Tensor, losses: Tensor | None) -> Decision:
        """Decide whether to skip a step. Every rank must call this once a step."""
        skipped = (~grad_norm.isfinite()).float()
        if self.stops:
            stopping = skipped
            for rule in self.rules:
                if (excused := rule.excuse()) is not None:
                    stopping = stopping.masked_fill(excused, 0.0)
            self.halted = torch.maximum(self.halted, stopping)
            skipped = torch.maximum(self.halted, skipped)
        decision = Decision(grad_norm, losses, self.halted, skipped, {})
        for rule in self.rules:
            rule.judge(decision)
        return decision
