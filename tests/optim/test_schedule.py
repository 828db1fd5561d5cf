"""Learning-rate and weight-decay schedules against NVIDIA's log and closed forms."""

from __future__ import annotations

import itertools
import math

import pytest

from megatron import plugins  # noqa: F401 (fills LR_DECAYS)
from megatron.errors import InputError
from megatron.optim.config import OptimizerConfig
from megatron.optim.schedule import Schedule


def make(**fields) -> Schedule:
    return Schedule.from_config(
        OptimizerConfig(**{"lr": 1e-3, **fields}), global_batch_size=4, train_samples=400
    )


def test_cosine_equals_nvidias_log() -> None:
    """Learning rates that Megatron-LM v2.5 logged in 6 iterations of 4 samples."""
    config = OptimizerConfig(
        lr=1e-3, min_lr=1e-5, lr_decay_style="cosine", lr_decay_iters=6, lr_warmup_fraction=0.34
    )
    schedule = Schedule.from_config(config, global_batch_size=4, train_samples=24)
    logged = ["4.902E-04", "9.804E-04", "8.632E-04", "5.129E-04", "1.578E-04", "1.000E-05"]
    assert [f"{schedule.lr(4 * (i + 1)):.3E}" for i in range(6)] == logged
    assert schedule.lr(0) == 0.0


@pytest.mark.parametrize(
    ("fields", "samples", "expected"),
    [
        ({}, 0, 1e-3),
        ({}, 200, 0.5e-3),
        ({"min_lr": 1e-4}, 200, 0.55e-3),
        ({"lr_decay_iters": 50}, 200, 0.0),
        ({"lr_decay_iters": 50, "min_lr": 1e-5}, 399, 1e-5),
        ({"lr_warmup_iters": 10}, 20, 0.5e-3),
        ({"lr_warmup_iters": 10, "lr_warmup_init": 1e-4}, 20, 0.55e-3),
        ({"lr_warmup_iters": 10, "lr_decay_style": "constant"}, 399, 1e-3),
        ({"lr_warmup_iters": 10, "lr_decay_style": "inverse-square-root"}, 160, 0.5e-3),
        ({"lr_decay_style": "WSD", "lr_wsd_decay_iters": 50}, 200, 1e-3),
        ({"lr_decay_style": "WSD", "lr_wsd_decay_iters": 50}, 300, (2 * math.sqrt(0.5) - 1) * 1e-3),
        ({"lr_decay_style": "WSD", "lr_wsd_decay_iters": 50, "lr_wsd_decay_style": "linear"}, 300, 0.5e-3),
        ({"lr_decay_style": "WSD", "lr_wsd_decay_iters": 50, "lr_wsd_decay_style": "cosine"}, 300, 0.5e-3),
        (
            {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 50, "lr_wsd_decay_style": "minus_sqrt"},
            250,
            0.5e-3,
        ),
    ],
)
def test_shapes(fields: dict, samples: int, expected: float) -> None:
    assert make(**fields).lr(samples) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("style", ["constant", "linear", "cosine", "inverse-square-root", "WSD"])
@pytest.mark.parametrize("warmup", [0, 7])
def test_stays_between_its_bounds(style: str, warmup: int) -> None:
    wsd = {"lr_wsd_decay_iters": 20} if style == "WSD" else {}
    schedule = make(lr_decay_style=style, lr_warmup_iters=warmup, min_lr=1e-5, lr_decay_iters=80, **wsd)
    rates = [schedule.lr(n) for n in range(401)]
    assert all(0 <= rate <= 1e-3 for rate in rates)
    after = rates[4 * warmup + 1 :]
    assert all(a >= b for a, b in itertools.pairwise(after))
    assert min(after) >= 1e-5


def test_weight_decay_grows() -> None:
    fields = {"start_weight_decay": 0.1, "end_weight_decay": 0.3}
    linear = make(weight_decay_incr_style="linear", **fields)
    cosine = make(weight_decay_incr_style="cosine", **fields)
    for schedule in (linear, cosine):
        assert [schedule.weight_decay(n) for n in (0, 200, 400, 1000)] == pytest.approx([0.1, 0.2, 0.3, 0.3])
    assert linear.weight_decay(100) == pytest.approx(0.15)
    assert cosine.weight_decay(100) < 0.15
    assert make(weight_decay=0.05).weight_decay(123) == 0.05


@pytest.mark.parametrize(
    ("fields", "flag"),
    [
        ({"min_lr": 1.0}, "--min-lr"),
        ({"lr": None}, "--lr"),
        ({"lr_warmup_fraction": 0.1, "lr_warmup_iters": 3}, "--lr-warmup-fraction"),
        ({"lr_warmup_iters": 100}, "--lr-warmup-iters"),
        ({"lr_decay_style": "WSD"}, "--lr-wsd-decay-iters"),
        ({"lr_decay_style": "WSD", "lr_wsd_decay_iters": 101}, "--lr-wsd-decay-iters"),
        ({"start_weight_decay": 0.1}, "--start-weight-decay"),
        ({"weight_decay_incr_style": "linear"}, "--start-weight-decay"),
    ],
)
def test_invalid_combinations_are_refused(fields: dict, flag: str) -> None:
    with pytest.raises(InputError, match=flag):
        make(**fields)
