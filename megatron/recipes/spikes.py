"""Skip steps whose loss or gradient norm is a spike (--spike-skip)."""

from __future__ import annotations

import math
from typing import Any

import torch

from megatron.optim.step_skipper import Decision, StepRule
from megatron.parallel.collectives import all_reduce_sum
from megatron.parallel.mesh import Mesh
from megatron.recipes.config import SpikeConfig
from megatron.training.config import RunConfig

# A step is compared with this many previous steps, and none is skipped before the minimum has been seen.
WINDOW, MIN_STEPS = 128, 64


def make_spike_rule(config: RunConfig, mesh: Mesh) -> SpikeRule | None:
    """The rule of a run, if it has --spike-skip."""
    sigma = config.plugin(SpikeConfig).spike_skip
    return None if sigma is None else SpikeRule(sigma, mesh)


class SpikeRule(StepRule):
    """Skips a step whose loss or gradient norm is more than `sigma` standard deviations above the mean of the last.

    Attributes:
        window: [2, WINDOW] losses and gradient norms of the last steps, NaN where there is none. Values above the limit
            are clipped to it: one spike does not hide the next, and the limit follows a lasting change.
    """

    name = "spike_window"

    def __init__(self, sigma: float, mesh: Mesh) -> None:
        self.sigma, self.mesh = sigma, mesh
        self.window = torch.full((2, WINDOW), torch.nan, device=mesh.device)

    def judge(self, decision: Decision) -> None:
        assert decision.losses is not None
        # The loss of the whole global batch, on every process.
        loss = all_reduce_sum(decision.losses.sum(), self.mesh.dp_cp, self.mesh.pp)
        now = torch.stack((loss.float(), decision.grad_norm))
        known = self.window.isfinite()
        count = known.sum(1)
        past = self.window.where(known, 0)
        mean = past.sum(1) / count
        deviation = ((past - mean.unsqueeze(1)).where(known, 0).square().sum(1) / count).sqrt()
        limit = (mean + self.sigma * deviation).where(count >= MIN_STEPS, torch.inf)
        entering = torch.minimum(now, limit).where(now.isfinite(), torch.nan)
        moved = torch.cat((self.window[:, 1:], entering.unsqueeze(1)), dim=1)
        self.window = torch.where(decision.halted.bool(), self.window, moved)
        decision.skipped = torch.maximum(decision.skipped, (now > limit).any().float())

    def state(self) -> list[list[float | None]]:
        """The window as JSON values."""
        return [[x if math.isfinite(x) else None for x in row] for row in self.window.tolist()]

    def is_state(self, value: Any) -> bool:
        return (
            isinstance(value, list)
            and len(value) == 2
            and all(isinstance(row, list) and len(row) == WINDOW for row in value)
            and all(x is None or (type(x) in (int, float) and abs(x) < 1e30) for row in value for x in row)
        )

    def load(self, state: list[list[float | None]]) -> None:
        """Continue with the window of a checkpoint."""
        rows = [[math.nan if x is None else x for x in row] for row in state]
        self.window.copy_(torch.tensor(rows))
