"""Saving by the clock, without --save-interval."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.training import hooks
from megatron.training.stop import StopRequests
from megatron.variants.mock_data import MockGPTDataset

TINY = """
    --device cpu --mock-data --tokenizer-type NullTokenizer --vocab-size 300 --num-workers 0 --num-layers 1
    --hidden-size 8 --num-attention-heads 1 --seq-length 8 --micro-batch-size 1 --lr 1e-2 --eval-iters 0
    --train-iters 6
""".split()


def test_every_evaluation_reads_the_same_samples(pretrain, monkeypatch: pytest.MonkeyPatch) -> None:
    """--eval-iters batches of --global-batch-size from the beginning of the validation data."""
    read: list[int] = []
    real = MockGPTDataset.__getitem__

    def record(self: MockGPTDataset, i: int) -> dict:
        if self.seed[1] == 1:
            read.append(i)
        return real(self, i)

    monkeypatch.setattr(MockGPTDataset, "__getitem__", record)
    pretrain(*TINY, "--eval-iters", 2, "--eval-interval", 3, "--global-batch-size", 3)
    assert read == [*range(6)] * 2  # after iterations 3 and 6


def test_without_save_interval_a_run_saves_every_30_minutes(
    pretrain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reason(stop: StopRequests) -> None:
        stop.elapsed += 700  # 1,800 seconds have passed after iteration 3, 1,800 more after iteration 6

    monkeypatch.setattr(StopRequests, "reason", reason)
    out = pretrain(*TINY, "--save", tmp_path / "a")
    assert f"checkpoints: {tmp_path / 'a'}, every 30 minutes and at the end\n" in out
    assert sorted(path.name for path in (tmp_path / "a").glob("iter_*")) == ["iter_0000003", "iter_0000006"]
    out = pretrain(*TINY, "--save", tmp_path / "b", "--save-interval", 4)
    assert "minutes" not in out
    assert sorted(path.name for path in (tmp_path / "b").glob("iter_*")) == ["iter_0000004", "iter_0000006"]
    assert "minutes" not in pretrain(*TINY)
    assert hooks.SAVE_MINUTES == 30
