"""Which steps are left out."""

from __future__ import annotations

import json
import math

import pytest
import torch
from models import CPU

from megatron.optim.config import OptimizerConfig
from megatron.optim.step_skipper import MIN_STEPS, StepSkipper, is_state


def gate(**settings: object) -> StepSkipper:
    return StepSkipper(OptimizerConfig(lr=1.0, **settings), CPU)


def ask(gate: StepSkipper, norm: float, loss: float = 1.0) -> bool:
    return bool(gate.decide(torch.tensor(norm), torch.tensor(loss, dtype=torch.float64)))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_left_out(bad: float) -> None:
    skip, stop = gate(on_non_finite="skip"), gate()
    assert [ask(skip, x) for x in (1.0, bad, 1.0)] == [False, True, False]
    assert [ask(stop, x) for x in (1.0, bad, 1.0)] == [False, True, True]


def test_spikes_of_either_value_are_left_out() -> None:
    generator = torch.Generator().manual_seed(0)
    usual = gate(spike_skip=6.0, on_non_finite="skip")
    noise = torch.randn(400, 2, generator=generator) * 0.1 + 2
    assert not ask(usual, 1000.0)  # too little is known yet
    usual = gate(spike_skip=6.0, on_non_finite="skip")
    for norm, loss in noise[:MIN_STEPS].tolist():
        assert not ask(usual, norm, loss)
    assert ask(usual, 2.0, 3.0) and ask(usual, 3.0, 2.0)
    assert not ask(usual, 2.0, 0.0)  # it falls as fast as it likes
    assert ask(usual, math.nan, 2.0)
    for norm, loss in noise[MIN_STEPS:].tolist():
        assert not ask(usual, norm, loss)
    # A row of spikes: none makes room for the next.
    assert all(ask(usual, 50.0) for _ in range(5))


def test_a_lasting_change_is_followed() -> None:
    followed = gate(spike_skip=6.0)
    for i in range(200):
        ask(followed, 1 + 0.01 * (i % 7))
    assert 1 < sum(ask(followed, 3 + 0.01 * (i % 7)) for i in range(200)) < 60


def test_the_window_goes_through_json() -> None:
    one = gate(spike_skip=3.0, on_non_finite="skip")
    for i in range(100):
        ask(one, math.sin(i) + 3, math.nan if i == 50 else math.cos(i))
    state = json.loads(json.dumps(one.state(), allow_nan=False))
    assert is_state(state) and is_state(None) and gate().state() is None
    other = gate(spike_skip=3.0, on_non_finite="skip")
    other.load(state)
    assert torch.equal(one.window.nan_to_num(-1), other.window.nan_to_num(-1))
    assert (
        not is_state(state[:1])
        and not is_state([state[0], state[1][:-1]])
        and not is_state([["x"] * 128] * 2)
    )


def test_the_window_stands_still_once_the_run_is_to_stop() -> None:
    stopping = gate(spike_skip=3.0)
    ask(stopping, 1.0)
    before = stopping.state()
    ask(stopping, math.nan)
    ask(stopping, 2.0)
    assert stopping.state() == before
