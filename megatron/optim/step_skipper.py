"""Steps to skip because of gradients that are not finite, or of spikes."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megatron.optim.config import OptimizerConfig

# --spike-skip compares a step with this many previous steps, and skips none before it has seen the minimum.
WINDOW, MIN_STEPS = 128, 64


class StepSkipper:
    """Decides on the device which steps to skip, so that the host need not wait.

    A step is skipped if its gradient is not finite. With `--on-non-finite stop` all later steps are skipped too, so
    that the weights stay as they were until the host notices and stops the run; an fp16 overflow that a smaller loss
    scale may prevent does not stop the run. With `--spike-skip SIGMA` a step is skipped if its loss or gradient norm is
    more than SIGMA standard deviations above the mean of the previous steps.

    Attributes:
        halted: scalar, 1 from the gradient on that stops the run.
        window: [2, WINDOW] losses and gradient norms of the last steps, NaN where there is none. Values above the limit
            are clipped to it: one spike does not hide the next, and the limit follows a lasting change.
    """

    def __init__(self, config: OptimizerConfig, device: torch.device) -> None:
        self.stops = config.on_non_finite == "stop"
        self.sigma = config.spike_skip
        self.halted = torch.zeros((), device=device)
        self.window = torch.full((2, WINDOW), torch.nan, device=device)

    def state(self) -> list[list[float | None]] | None:
        """Window as JSON values; None without `--spike-skip`."""
        if self.sigma is None:
            return None
        return [[x if math.isfinite(x) else None for x in row] for row in self.window.tolist()]

    def load(self, state: list[list[float | None]]) -> None:
        """Continue with the window of a checkpoint."""
        rows = [[math.nan if x is None else x for x in row] for row in state]
        self.window.copy_(torch.tensor(rows))

    def decide(self, grad_norm: Tensor, loss: Tensor | None, excused: Tensor | None = None) -> Tensor:
        """Decide whether to skip a step. Every rank must call this once a step, with the same values.

        Args:
            loss: loss of the global batch, a scalar; needed with `--spike-skip`.
            excused: a scalar; where it is true, a gradient that is not finite does not stop the run.

        Returns:
            A scalar, 1 to skip and 0 not to.
        """
        skipped = (~grad_norm.isfinite()).float()
        if self.stops:
            stopping = skipped if excused is None else skipped.masked_fill(excused, 0.0)
            self.halted = torch.maximum(self.halted, stopping)
            skipped = torch.maximum(self.halted, skipped)
        if self.sigma is None:
            return skipped
        assert loss is not None
        now = torch.stack((loss.float(), grad_norm))
        known = self.window.isfinite()
        count = known.sum(1)
        past = self.window.where(known, 0)
        mean = past.sum(1) / count
        deviation = ((past - mean.unsqueeze(1)).where(known, 0).square().sum(1) / count).sqrt()
        limit = (mean + self.sigma * deviation).where(count >= MIN_STEPS, torch.inf)
        entering = torch.minimum(now, limit).where(now.isfinite(), torch.nan)
        moved = torch.cat((self.window[:, 1:], entering.unsqueeze(1)), dim=1)
        self.window = torch.where(self.halted.bool(), self.window, moved)
        return torch.maximum(skipped, (now > limit).any().float())


def is_state(value: Any) -> bool:
    """Check that `value` could be the return value of `StepSkipper.state`."""
    if value is None:
        return True
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(isinstance(row, list) and len(row) == WINDOW for row in value)
        and all(x is None or (type(x) in (int, float) and abs(x) < 1e30) for row in value for x in row)
    )
