"""Steps skipped for spikes of the loss or the gradient norm."""

from __future__ import annotations

import json
import math

import torch
from models import CPU

from megatron.optim.step_skipper import StepSkipper
from megatron.parallel.mesh import Mesh
from megatron.recipes.spikes import MIN_STEPS, SpikeRule


def skipper(sigma: float, *, stops: bool = True) -> StepSkipper:
    return StepSkipper([SpikeRule(sigma, Mesh(device=CPU))], CPU, stops=stops)


def skips(skipper: StepSkipper, norm: float, loss: float = 1.0) -> bool:
    return bool(skipper.decide(torch.tensor(norm), torch.tensor([loss], dtype=torch.float64)).skipped)


def test_spikes_of_norm_or_loss_are_skipped() -> None:
    generator = torch.Generator().manual_seed(0)
    usual = skipper(6.0, stops=False)
    noise = torch.randn(400, 2, generator=generator) * 0.1 + 2
    assert not skips(usual, 1000.0)  # the window has too few steps
    usual = skipper(6.0, stops=False)
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
    followed = skipper(6.0)
    for i in range(200):
        skips(followed, 1 + 0.01 * (i % 7))
    assert 1 < sum(skips(followed, 3 + 0.01 * (i % 7)) for i in range(200)) < 60


def test_the_state_survives_json() -> None:
    one = skipper(3.0, stops=False)
    for i in range(100):
        skips(one, math.sin(i) + 3, math.nan if i == 50 else math.cos(i))
    state = json.loads(json.dumps(one.rules[0].state(), allow_nan=False))
    assert one.rules[0].is_state(state)
    other = skipper(3.0, stops=False)
    other.rules[0].load(state)
    assert torch.equal(one.rules[0].window.nan_to_num(-1), other.rules[0].window.nan_to_num(-1))
    assert (
        not one.rules[0].is_state(state[:1])
        and not one.rules[0].is_state([state[0], state[1][:-1]])
        and not one.rules[0].is_state([["x"] * 128] * 2)
    )


def test_the_window_is_frozen_once_the_run_stops() -> None:
    stopping = skipper(3.0)
    skips(stopping, 1.0)
    before = stopping.rules[0].state()
    skips(stopping, math.nan)
    skips(stopping, 2.0)
    assert stopping.rules[0].state() == before
