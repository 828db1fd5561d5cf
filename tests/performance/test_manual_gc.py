"""Manual garbage collection."""

from __future__ import annotations

import gc

import pytest
from models import config_of

from megatron.errors import InputError
from megatron.plugins import training_hooks
from megatron.pretrain_gpt import GPT
from megatron.training.loop import Hook, Trainer
from megatron.training.pretrain import pretrain

FLAGS = "--train-iters 6 --eval-interval 2 --eval-iters 1 --num-workers 0"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", []),
        ("--manual-gc", [(0, 2), (2, 2), (2, 0), (4, 2), (4, 0)]),
        ("--manual-gc --no-manual-gc-eval", [(0, 2)]),
        ("--manual-gc --no-manual-gc-eval --manual-gc-interval 3", [(0, 2), (3, 2), (6, 2)]),
    ],
)
def test_when_garbage_is_collected(
    monkeypatch: pytest.MonkeyPatch, flags: str, expected: list[tuple[int, int]]
) -> None:
    iteration, collections, automatic = 0, [], []

    class Watch(Hook):
        def after_step(self, trainer: Trainer) -> None:
            nonlocal iteration
            automatic.append(gc.isenabled())
            iteration = trainer.state.iteration

    monkeypatch.setattr(gc, "collect", lambda generation=2: collections.append((iteration, generation)))
    assert pretrain(config_of(f"{FLAGS} {flags}"), GPT, [Watch(), *training_hooks()]) == 0
    assert collections == expected
    assert automatic == [not expected] * 6
    assert gc.isenabled()


def test_flags_need_manual_gc() -> None:
    for flag in ("--manual-gc-interval 5", "--no-manual-gc-eval"):
        with pytest.raises(InputError, match=rf"^{flag.split()[0]} needs --manual-gc$"):
            config_of(flag)
