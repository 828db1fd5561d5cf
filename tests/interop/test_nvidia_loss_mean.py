"""Megatron-LM's mean of the loss: the mean of the microbatches' means."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from distributed import run_distributed

from megatron.arguments import parse_run_config
from megatron.commands.finetune_bert import main
from megatron.errors import InputError
from megatron.plugins import run
from megatron.pretrain_gpt import DEFAULTS, GPT

# Documents of NullTokenizer's mock data end within samples, so --eod-mask-loss masks other numbers of tokens in each.
FLAGS = """
    --num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --mock-data --device cpu
    --tokenizer-type NullTokenizer --vocab-size 3 --eod-mask-loss --micro-batch-size 1 --lr 1e-12
    --attention-dropout 0 --hidden-dropout 0 --eval-iters 0 --num-workers 0 --log-interval 1
""".split()


def train(folder: str, words: list[str]) -> None:
    """Train on this process, which may be one of several."""
    words = [*FLAGS, "--metrics-path", f"{folder}/metrics.jsonl", *words]
    assert run(parse_run_config(words, description="", defaults=DEFAULTS), GPT) == 0


def losses(folder: Path, *words: object) -> list[float]:
    folder.mkdir()
    train(str(folder), [str(word) for word in words])
    return logged(folder)


def logged(folder: Path, key: str = "lm loss") -> list[float]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record[key] for record in records if key in record]


def test_mean_of_microbatch_means(tmp_path: Path) -> None:
    """Weights hardly change, so the losses of four samples one by one give both means of a batch of four."""
    single = losses(tmp_path / "single", "--global-batch-size", 1, "--train-iters", 4)
    batch = ["--global-batch-size", 4, "--train-iters", 1]
    (theirs,) = losses(tmp_path / "theirs", *batch, "--loss-mean", "microbatches")
    (ours,) = losses(tmp_path / "ours", *batch, "--calculate-per-token-loss")
    assert theirs == pytest.approx(sum(single) / 4, rel=1e-6)
    assert ours != pytest.approx(theirs, rel=1e-5)


def test_gradients_follow_the_mean(tmp_path: Path) -> None:
    """Replicas and pipeline stages: the same loss and grad norm as one process with the same microbatches."""
    words = "--global-batch-size 4 --train-iters 1 --loss-mean microbatches".split()
    (expected,) = losses(tmp_path / "one", *words)
    (tmp_path / "four").mkdir()
    run_distributed(train, 4, str(tmp_path / "four"), [*words, "--pipeline-model-parallel-size", "2"])
    assert logged(tmp_path / "four") == pytest.approx([expected], rel=1e-6)
    norms = [logged(tmp_path / name, "grad norm") for name in ("one", "four")]
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


def test_fine_tuning_has_no_such_flag() -> None:
    """Its loss counts every example of a batch."""
    with pytest.raises(InputError, match="--loss-mean is not a flag of this command"):
        main(["--loss-mean", "microbatches"])
