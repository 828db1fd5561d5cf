"""Exit before the last iteration."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron.recipes.config import ExitConfig
from megatron.recipes.exit import Exit

TINY = """
    --device cpu --mock-data --tokenizer-type NullTokenizer --vocab-size 300 --num-workers 0 --num-layers 1
    --hidden-size 8 --num-attention-heads 1 --seq-length 8 --micro-batch-size 1 --lr 1e-2 --eval-iters 1
    --train-iters 3 --exit-interval 3
""".split()
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


def test_the_last_iteration_is_no_early_exit(pretrain) -> None:
    out = pretrain(*TINY)
    assert "stopped after" not in out and " 3/3  test loss " in out
