"""Failures, money and energy."""

from __future__ import annotations

import pytest

from megatron.planner.budget import Failures, expenses, two_digits


def test_llama_3_on_16384_gpus():
    """2407.21783 section 3.3.4: 419 interruptions in 54 days, and more than 90% of the time for training."""
    failures = Failures(between=54 * 86400 / 419, checkpoint=30, restart=600)
    assert failures.between / 3600 == pytest.approx(3.1, abs=0.1)
    assert 0.85 < failures.goodput(failures.best_interval) < 0.92


@pytest.mark.parametrize("factor", [0.5, 0.9, 1.1, 2.0])
def test_the_best_interval_loses_the_least(factor: float):
    failures = Failures(between=100_000, checkpoint=20, restart=300)
    best = failures.best_interval
    assert failures.goodput(best) > failures.goodput(factor * best)


def test_advice():
    often = Failures(between=100_000, checkpoint=20, restart=300)
    assert often.advice(1.5) == (
        "a failure every 28 hours; a checkpoint every 33 minutes (1,300 steps) loses the least and leaves 98% of the "
        "time for training"
    )
    never = Failures(between=200, checkpoint=20, restart=300)
    assert never.advice(1.5).endswith("too soon after a restart for training to make progress")


@pytest.mark.parametrize(
    ("step", "words"), [(2000.0, "33 minutes (1 step)"), (400.0, "20 minutes (3 steps)")]
)
def test_checkpoints_come_at_whole_steps(step: float, words: str):
    """The best interval, 1,200 seconds, is shorter than the longer step: a failure costs half of that, not of it."""
    failures = Failures(between=36_000, checkpoint=20, restart=300)
    interval = max(step, 1200)
    left = (1 - 20 / (interval + 20)) * (1 - (interval / 2 + 300) / 36_000)
    assert f"{words} loses the least and leaves {left:.0%} of" in failures.advice(step)


def test_expenses():
    assert expenses(1000, 2.5, None) == "$2,500 at $2.5 for a GPU-hour"
    assert expenses(1000, None, 1400.0) == "1.4 MWh at 1400 W a GPU"
    assert expenses(1000, None, None) == ""


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.01234, "0.012"),
        (1.234, "1.2"),
        (12.34, "12"),
        (99.6, "100"),
        (123.4, "120"),
        (4_944_326, "4,900,000"),
    ],
)
def test_two_digits(value: float, text: str):
    assert two_digits(value) == text
