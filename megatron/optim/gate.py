"""Which steps of the optimizer are left out."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megatron.optim.config import OptimizerConfig

# Steps that --spike-skip compares a step with, at most, and at least.
WINDOW, ENOUGH = 128, 64


class Gate:
    """Decides on the device which steps are left out, so that the host does not wait to know.

    A step whose gradient is not finite is always left out. With `--on-non-finite stop` so is every later one, unless
    the scale of an fp16 run's loss may be at fault: the weights stay as they were before it until the host, which looks
    now and then, stops the run. With
    `--spike-skip SIGMA` a step is left out whose loss or gradient norm is above the mean of the last steps by more
    than SIGMA standard deviations.

    Attributes:
        shut: 1 from the first gradient on that was not finite, where the run is to stop.
        window: [2, WINDOW] the last losses and gradient norms, what is above the limit taken as the limit: a spike
            does not hide the next, and a lasting change is followed within some steps. NaN where there is none.
    """

    def __init__(self, config: OptimizerConfig, device: torch.device) -> None:
        self.stops = config.on_non_finite == "stop"
        self.sigma = config.spike_skip
        self.shut = torch.zeros((), device=device)
        self.window = torch.full((2, WINDOW), torch.nan, device=device)

    def state(self) -> list[list[float | None]] | None:
        """The window as JSON has it; None without `--spike-skip`."""
        if self.sigma is None:
            return None
        return [[x if math.isfinite(x) else None for x in row] for row in self.window.tolist()]

    def load(self, state: list[list[float | None]]) -> None:
        """Go on with the window of a checkpoint."""
        rows = [[math.nan if x is None else x for x in row] for row in state]
        self.window.copy_(torch.tensor(rows))

    def leaves_out(self, grad_norm: Tensor, loss: Tensor | None, excused: Tensor | None = None) -> Tensor:
        """Whether to leave out the step of these, a scalar, 0 or 1; `loss` is asked for with `--spike-skip` alone.
        Where `excused`, a gradient that is not finite does not stop the run.

        To be called once a step, with the same values on every process.
        """
        out = (~grad_norm.isfinite()).float()
        if self.stops:
            self.shut = torch.maximum(self.shut, out if excused is None else out.masked_fill(excused, 0.0))
            out = torch.maximum(self.shut, out)
        if self.sigma is None:
            return out
        now = torch.stack((loss.float(), grad_norm))
        known = self.window.isfinite()
        count = known.sum(1)
        past = self.window.where(known, 0)
        mean = past.sum(1) / count
        deviation = ((past - mean.unsqueeze(1)).where(known, 0).square().sum(1) / count).sqrt()
        limit = (mean + self.sigma * deviation).where(count >= ENOUGH, torch.inf)
        entering = torch.minimum(now, limit).where(now.isfinite(), torch.nan)
        moved = torch.cat((self.window[:, 1:], entering.unsqueeze(1)), dim=1)
        self.window = torch.where(self.shut.bool(), self.window, moved)
        return torch.maximum(out, (now > limit).any().float())


def is_state(value: Any) -> bool:
    """Whether `value` is what `Gate.state` gives."""
    if value is None:
        return True
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(isinstance(row, list) and len(row) == WINDOW for row in value)
        and all(x is None or (type(x) in (int, float) and abs(x) < 1e30) for row in value for x in row)
    )
