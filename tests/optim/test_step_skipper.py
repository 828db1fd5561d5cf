"""Steps skipped for gradients that are not finite."""

from __future__ import annotations

import math

import pytest
import torch
from models import CPU

from megatron.optim.step_skipper import StepRule, StepSkipper


class Excuse(StepRule):
    def excuse(self) -> torch.Tensor:
        return torch.tensor(True)


def skips(skipper: StepSkipper, norm: float) -> bool:
    return bool(skipper.decide(torch.tensor(norm), None).skipped)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_steps_are_skipped(bad: float) -> None:
    skip, stop = StepSkipper([], CPU, stops=False), StepSkipper([], CPU, stops=True)
    assert [skips(skip, x) for x in (1.0, bad, 1.0)] == [False, True, False]
    assert [skips(stop, x) for x in (1.0, bad, 1.0)] == [False, True, True]
    excused = StepSkipper([Excuse()], CPU, stops=True)
    assert [skips(excused, x) for x in (1.0, bad, 1.0)] == [False, True, False]
