"""Checkpoints of an earlier version still load, and their runs continue with the same losses.

`data/fp32` was written by one process, `data/fp16-tp2` by two tensor-parallel processes with --fp16. Both hold a run of
eight iterations that was stopped after four, with its optimizer, schedule, history, spike window and loss scaler.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.checkpoint.find import find_checkpoint

DATA = Path(__file__).parent / "data"
FLAGS = """
    --mock-data --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --micro-batch-size 2
    --global-batch-size 4 --train-iters 8 --lr 1e-2 --lr-warmup-iters 2 --lr-decay-style cosine --weight-decay 0.1
    --spike-skip 3.0 --log-interval 1 --eval-interval 100 --eval-iters 1 --tokenizer-type NullTokenizer
    --vocab-size 31 --make-vocab-size-divisible-by 8 --num-workers 0 --device cpu --attention-dropout 0
"""
# Loss, gradient norm and loss scale of an earlier version, continued in one process, without the dropout of attention,
# whose masks are others today. The first row is a mean over iterations 4 and 5, since iteration 4 had not been logged.
RECORDED = {
    "fp32": [
        (3.411068856716156, 1.0968117713928223, None),
        (3.3650341033935547, 1.0801867246627808, None),
        (3.3424729108810425, 1.1880161762237549, None),
        (3.306912899017334, 1.4214446544647217, None),
    ],
    "fp16-tp2": [
        (3.410445213317871, 1.0897705554962158, 131072.0),
        (3.3648310899734497, 1.075057029724121, 262144.0),
        (3.3450435400009155, 1.2090352773666382, 262144.0),
        (3.309024691581726, 1.5270622968673706, 262144.0),
    ],
}
TEST_LOSS = {"fp32": 3.309250593185425, "fp16-tp2": 3.307403087615967}


@pytest.mark.parametrize(
    ("name", "flags"),
    [("fp32", ""), ("fp16-tp2", "--fp16 --initial-loss-scale 65536 --loss-scale-window 3")],
)
def test_run_continues(name: str, flags: str, pretrain: Callable[..., str], tmp_path: Path) -> None:
    assert find_checkpoint(str(DATA / name), None).iteration == 4
    metrics = tmp_path / "metrics.jsonl"
    out = pretrain(*FLAGS.split(), *flags.split(), "--load", DATA / name, "--metrics-path", metrics)
    assert "schedule" not in out and "another order" not in out
    *rows, _, test = map(json.loads, metrics.read_text().splitlines())
    assert [row["iteration"] for row in rows] == [5, 6, 7, 8]
    for row, (loss, norm, scale) in zip(rows, RECORDED[name], strict=True):
        assert row["lm loss"] == pytest.approx(loss, rel=1e-5)
        assert row["grad norm"] == pytest.approx(norm, rel=1e-3 if scale else 1e-4)
        assert row.get("loss scale") == scale
    assert test["lm loss test"] == pytest.approx(TEST_LOSS[name], rel=1e-5)
