"""Exit before the last iteration."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron.recipes.config import ExitConfig
from megatron.recipes.exit import Exit

MINUTES, INTERVAL = "--exit-duration-in-mins 2 is over", "iteration 6 is a multiple of --exit-interval 3"


@pytest.mark.parametrize(
    ("iteration", "elapsed", "before", "after"),
    [
        (5, 119, None, None),
        (6, 119, None, INTERVAL),
        (5, 121, None, MINUTES),
        (6, 121, None, MINUTES),
        (6, 121, "SIGTERM was received", "SIGTERM was received"),
    ],
)
def test_the_reason(iteration: int, elapsed: int, before: str | None, after: str | None) -> None:
    limits = ExitConfig(exit_interval=3, exit_duration_in_mins=2)
    trainer = SimpleNamespace(
        config=SimpleNamespace(plugin=lambda _: limits),
        state=SimpleNamespace(iteration=iteration),
        elapsed=elapsed,
        stop_reason=before,
        is_due=lambda interval: iteration % interval == 0,
    )
    Exit().after_step(trainer)
    assert trainer.stop_reason == after
