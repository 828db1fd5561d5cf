"""The loss scaler against a plain model of Megatron-LM's."""

from __future__ import annotations

import json
import random

import pytest
import torch
from loss_scale import PlainScale
from models import CPU

from megatron.recipes.config import LossScaleConfig
from megatron.recipes.loss_scale import LossScaler

YES, NO = torch.tensor(True), torch.tensor(False)


def scaler(**settings: object) -> LossScaler:
    return LossScaler(LossScaleConfig(**settings), CPU)


@pytest.mark.parametrize("seed", range(8))
def test_matches_the_plain_model(seed: int) -> None:
    """Random overflows, rare and frequent, with state saved and loaded at random steps."""
    draw = random.Random(seed)
    initial, minimum = 2.0 ** draw.randint(0, 33), draw.choice((1.0, 0.25, 0.7))
    settings = {"loss_scale_window": draw.randint(1, 9), "hysteresis": draw.randint(1, 4)}
    plain = PlainScale(initial, minimum, *settings.values())
    ours = scaler(initial_loss_scale=initial, min_loss_scale=minimum, **settings)
    for step in range(600):
        likely = 0.8 if plain.scale > 2.0**60 else (0.02, 0.3, 0.8)[step // 50 % 3]
        overflow = draw.random() < likely
        assert bool(ours.excuse()) == (plain.scale > minimum)
        ours.update(torch.tensor(overflow), hold=NO)
        assert ours.loss_scale.item() == pytest.approx(plain.step(overflow), rel=1e-7), step
        if draw.random() < 0.1:
            state = json.loads(json.dumps(ours.state()))
            assert ours.is_state(state)
            ours = scaler(initial_loss_scale=8.0, min_loss_scale=minimum, **settings)
            ours.load(state)


def test_only_growth_restores_hysteresis() -> None:
    ours = scaler(initial_loss_scale=64.0, loss_scale_window=3, hysteresis=2)
    scales = []
    for overflow in (1, 0, 1, 0, 1, 1, 0, 0, 0, 1, 1):
        ours.update(torch.tensor(bool(overflow)), hold=NO)
        scales.append(ours.loss_scale.item())
    assert scales == [64, 64, 32, 32, 16, 8, 8, 8, 16, 16, 8]


def test_a_fixed_scale_stays_constant() -> None:
    ours = scaler(loss_scale=128.0)
    for overflow in (YES, YES, NO, YES):
        assert not ours.excuse()
        ours.update(overflow, hold=NO)
    ours.load({"scale": 2.0, "clean": 1, "patience": 1})
    assert ours.loss_scale == 128 and ours.state() is None


def test_hold_freezes_the_state() -> None:
    ours = scaler(initial_loss_scale=4.0, hysteresis=1)
    for _ in range(2):
        ours.update(NO, hold=NO)
    before = {"scale": 4.0, "clean": 2, "patience": 1}
    assert ours.state() == before
    for overflow in (NO, YES, NO):
        ours.update(overflow, hold=YES)
        assert ours.state() == before


def test_never_grows_to_infinity() -> None:
    ours = scaler(initial_loss_scale=2.0**48, loss_scale_window=1)
    for _ in range(200):
        ours.update(NO, hold=NO)
    assert ours.loss_scale == 2.0**126 and ours.is_state(ours.state())


def test_a_raised_minimum_applies_to_a_loaded_scale() -> None:
    ours = scaler(min_loss_scale=16.0)
    ours.load({"scale": 2.0, "clean": 1, "patience": 0})
    assert ours.loss_scale == 16


@pytest.mark.parametrize(
    "change",
    [
        {"scale": 0.0},
        {"scale": 10**400},
        {"scale": "8"},
        {"scale": float("nan")},
        {"clean": -1},
        {"clean": 1.5},
        {"patience": 2**31},
        {"more": 1},
    ],
)
def test_is_state_rejects_invalid_states(change: dict) -> None:
    ours = scaler()
    right = {"scale": 8.0, "clean": 0, "patience": 0}
    assert ours.is_state(right) and not ours.is_state(right | change)
    assert not ours.is_state([right]) and not ours.is_state({"scale": 8.0})
