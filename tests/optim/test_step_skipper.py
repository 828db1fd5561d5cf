"""Skipped steps: non-finite gradients, and spikes of gradient norm or loss."""

from __future__ import annotations

import json
import math

import pytest
import torch
from models import CPU

from megatron.optim.config import OptimizerConfig
from megatron.optim.step_skipper import MIN_STEPS, StepSkipper, is_state


def skipper(**settings: object) -> StepSkipper:
    return StepSkipper(OptimizerConfig(lr=1.0, **settings), CPU)


def skips(skipper: StepSkipper, norm: float, loss: float = 1.0) -> bool:
    return bool(skipper.decide(torch.tensor(norm), torch.tensor(loss, dtype=torch.float64)))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_steps_are_skipped(bad: float) -> None:
    skip, stop = skipper(on_non_finite="skip"), skipper()
    assert [skips(skip, x) for x in (1.0, bad, 1.0)] == [False, True, False]
    assert [skips(stop, x) for x in (1.0, bad, 1.0)] == [False, True, True]


def test_spikes_of_norm_or_loss_are_skipped() -> None:
    generator = torch.Generator().manual_seed(0)
    usual = skipper(spike_skip=6.0, on_non_finite="skip")
    noise = torch.randn(400, 2, generator=generator) * 0.1 + 2
    assert not skips(usual, 1000.0)  # the window has too few steps
    usual = skipper(spike_skip=6.0, on_non_finite="skip")
    for norm, loss in noise[:MIN_STEPS].tolist():
        assert not skips(usual, norm, loss)
    assert skips(usual, 2.0, 3.0) and skips(usual, 3.0, 2.0)
    assert not skips(usual, 2.0, 0.0)  # a falling loss is not a spike
    assert skips(usual, math.nan, 2.0)
    for norm, loss in noise[MIN_STEPS:].tolist():
        assert not skips(usual, norm, loss)
    # Spikes enter the window clipped to the limit, so repeated spikes are all skipped.
    assert all(skips(usual, 50.0) for _ in range(5))


def test_a_lasting_change_is_accepted() -> None:
    followed = skipper(spike_skip=6.0)
    for i in range(200):
        skips(followed, 1 + 0.01 * (i % 7))
    assert 1 < sum(skips(followed, 3 + 0.01 * (i % 7)) for i in range(200)) < 60


def test_the_state_survives_json() -> None:
    one = skipper(spike_skip=3.0, on_non_finite="skip")
    for i in range(100):
        skips(one, math.sin(i) + 3, math.nan if i == 50 else math.cos(i))
    state = json.loads(json.dumps(one.state(), allow_nan=False))
    assert is_state(state) and is_state(None) and skipper().state() is None
    other = skipper(spike_skip=3.0, on_non_finite="skip")
    other.load(state)
    assert torch.equal(one.window.nan_to_num(-1), other.window.nan_to_num(-1))
    assert (
        not is_state(state[:1])
        and not is_state([state[0], state[1][:-1]])
        and not is_state([["x"] * 128] * 2)
    )


def test_the_window_is_frozen_once_the_run_stops() -> None:
    stopping = skipper(spike_skip=3.0)
    skips(stopping, 1.0)
    before = stopping.state()
    skips(stopping, math.nan)
    skips(stopping, 2.0)
    assert stopping.state() == before
