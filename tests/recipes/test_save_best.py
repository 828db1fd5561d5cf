"""The checkpoint with the lowest validation loss."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.checkpoint.storage import newest_iteration
from megatron.errors import InputError
from megatron.recipes import save_best
from megatron.training.engine import Engine

TINY = """
    --device cpu --mock-data --tokenizer-type NullTokenizer --vocab-size 300 --num-workers 0 --num-layers 1
    --hidden-size 8 --num-attention-heads 1 --seq-length 8 --micro-batch-size 1 --lr 1e-2 --eval-iters 1
    --eval-interval 1 --train-iters 6 --save-best
""".split()


def set_losses(monkeypatch: pytest.MonkeyPatch, losses: list[float]) -> None:
    """Let evaluations on validation data give these losses; those at the end are followed by test data."""
    monkeypatch.setattr(Engine, "evaluate", lambda self, batches: {"lm loss": losses.pop(0)})


@pytest.mark.parametrize("flags", [[], ["--async-save"]], ids=["", "async"])
def test_the_best_checkpoint_is_kept(
    pretrain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    set_losses(monkeypatch, [5, 3, 4, float("nan"), 3.5, 6, 0])
    run = [*TINY, *flags, "--keep-last", 1, "--save", tmp_path / "a", "--load", tmp_path / "a"]
    out = pretrain(*run)
    best = tmp_path / "a" / "best"
    assert f"lowest validation loss so far: 3.0000, kept in {best}\n" in out
    assert newest_iteration(best) == 2 and [path.name for path in best.glob("iter_*")] == ["iter_0000002"]
    assert [path.name for path in (tmp_path / "a").glob("iter_*")] == ["iter_0000006"]
    # The run that is extended remembers the loss, and can be better at its end.
    set_losses(monkeypatch, [3.2, 2, 0])
    pretrain(*run, "--train-iters", 8)
    assert newest_iteration(best) == 8
    monkeypatch.undo()
    assert "iterations 9 to 10" in pretrain(
        *TINY, "--load", best, "--save", tmp_path / "b", "--train-iters", 10
    )


def test_the_previous_best_stays_until_the_new_one_is_whole(
    pretrain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_losses(monkeypatch, [5, 3, 4, 4, 4, 4, 0])

    def killed(root: Path, iteration: int) -> Path:
        if iteration == 2:
            raise KeyboardInterrupt
        return keep_best(root, iteration)

    keep_best = save_best.keep_best
    monkeypatch.setattr(save_best, "keep_best", killed)
    with pytest.raises(KeyboardInterrupt):
        pretrain(*TINY, "--save", tmp_path)
    assert newest_iteration(tmp_path / "best") == 1
    loss = json.loads((tmp_path / "best" / "iter_0000001" / save_best.LOSS).read_text())
    assert loss == {"loss": 5}
    assert save_best.lowest_before(tmp_path, 2) == 5 and save_best.lowest_before(tmp_path, 1) == float("inf")


@pytest.mark.parametrize("iteration", [4, 6], ids=["between steps", "at the end"])
def test_a_run_killed_before_it_keeps_a_checkpoint_keeps_it_later(
    pretrain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, iteration: int
) -> None:
    """The evaluation is not repeated, for the checkpoint does not say that it is due."""
    losses = [5.0] * 6 + [0]
    losses[iteration - 1] = 3
    set_losses(monkeypatch, losses)

    def killed(root: Path, iteration: int) -> Path:
        if iteration > 1:
            raise KeyboardInterrupt
        return keep_best(root, iteration)

    keep_best = save_best.keep_best
    run = [*TINY, "--save-interval", 1, "--save", tmp_path]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(save_best, "keep_best", killed)
        pretrain(*run)
    assert newest_iteration(tmp_path) == iteration and newest_iteration(tmp_path / "best") == 1
    out = pretrain(*run, "--load", tmp_path)
    assert out.count(f"lowest validation loss so far: 3.0000, kept in {tmp_path / 'best'}\n") == 1
    assert newest_iteration(tmp_path / "best") == iteration
    # Of another iteration than the run's it is forgotten.
    (tmp_path / save_best.CANDIDATE).write_text('{"iteration": 2, "loss": 0}')
    assert save_best.candidate_of(tmp_path, 6) == (0, 0) == save_best.candidate_of(tmp_path, 2)


def test_what_save_best_needs(pretrain) -> None:
    with pytest.raises(InputError, match=r"^--save-best needs --save, the folder to write checkpoints to$"):
        pretrain(*TINY)
    with pytest.raises(
        InputError, match=r"^--save-best needs evaluations; with --eval-iters 0 there are none$"
    ):
        pretrain(*TINY, "--eval-iters", 0, "--save", "x")
