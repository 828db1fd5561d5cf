"""The length of a run in tokens and epochs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron.arguments import parse_run_config
from megatron.data.indexed_writer import IndexedDatasetWriter
from megatron.errors import InputError
from megatron.training.batch_size import make_batch_schedule
from megatron.training.layout import check_layout

TINY = """
    --device cpu --tokenizer-type NullTokenizer --vocab-size 300 --num-workers 0 --num-layers 1 --hidden-size 8
    --num-attention-heads 1 --seq-length 8 --micro-batch-size 2 --lr 1e-2 --eval-iters 0
""".split()


def parse(*flags: str):
    return parse_run_config([*TINY, "--mock-data", *flags], description="", defaults={})


def test_tokens_are_whole_samples() -> None:
    """1,000 tokens are 125 samples of 8 tokens, which are 15 batches of 8."""
    config = parse("--train-tokens", "1007", "--global-batch-size", "8")
    assert config.training.train_samples == 125
    assert make_batch_schedule(config, 2).iterations(125) == 15


def test_a_run_that_does_not_train_may_be_shorter_than_a_batch() -> None:
    config = parse("--train-tokens", "63", "--global-batch-size", "8", "--skip-train")
    assert config.training.train_samples == 7


def test_sizes_that_are_defaults_of_the_program() -> None:
    """The sequence length and the batch of `megatron.api.main(defaults=...)` count as those of flags."""
    defaults = {
        "seq_length": 8,
        "micro_batch_size": 2,
        "global_batch_size": 4,
        "train_iters": 100,
        "lr": 1e-2,
    }
    i = TINY.index("--seq-length")
    tiny = ["--mock-data", *TINY[:i]]

    def training(*flags: str, **more: int):
        return parse_run_config([*tiny, *flags], description="", defaults=defaults | more).training

    config = training("--train-tokens", "1007")
    assert (config.train_samples, config.train_iters) == (125, None)
    with pytest.raises(
        InputError, match=r"^--train-tokens: 31 is less than a batch of 4 samples of --seq-length 8"
    ):
        training("--train-tokens", "31")
    del defaults["train_iters"]
    assert training(train_tokens=80).train_samples == 10
    config = training("--train-iters", "7", train_tokens=80)
    assert (config.train_samples, config.train_iters) == (None, 7)
    del defaults["seq_length"]
    with pytest.raises(InputError, match=r"^--seq-length is required"):
        training("--train-tokens", "1007")


def test_tokens_with_a_growing_batch() -> None:
    """Batches of 2, 4, 6 and 8 up to sample 60, then of 8."""
    ramp = ["--rampup-batch-size", "2", "2", "60", "--global-batch-size", "8"]
    config = parse("--train-tokens", "1000", *ramp)
    batches, consumed, steps = make_batch_schedule(config, 1), 0, 0
    while consumed + batches.batch_size(consumed) <= 125:
        consumed, steps = consumed + batches.batch_size(consumed), steps + 1
    assert batches.iterations(125) == steps > 125 // 8


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "",
            "--train-iters, --train-samples, --train-tokens or --train-epochs is required: how long to train",
        ),
        (
            "--train-iters 1 --train-tokens 9",
            "--train-tokens: 9 does not go with --train-iters 1; give only one length",
        ),
        (
            "--train-tokens 63 --global-batch-size 8",
            "--train-tokens: 63 is less than a batch of 8 samples of --seq-length 8 tokens; give at least 64",
        ),
        ("--train-tokens -1", "--train-tokens: -1 is too small; it must be at least 1"),
        ("--train-epochs 0", "--train-epochs: 0.0 is too small; it must be greater than 0"),
        (
            "--train-epochs 1 --lr-warmup-iters 5",
            "--lr-warmup-iters: 5 does not go with --train-epochs; use --lr-warmup-samples",
        ),
    ],
)
def test_wrong_lengths(flags: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        parse(*flags.split())
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--train-samples 7", "--train-samples: 7 is less than a batch of 8 samples"),
        ("--train-tokens 63", "--train-tokens: 63 are 7 samples, less than a batch of 8 samples"),
        (
            "--train-samples 3 --rampup-batch-size 4 4 8",
            "--train-samples: 3 is less than a batch of 4 samples",
        ),
    ],
)
def test_samples_that_fill_no_batch(flags: str, message: str) -> None:
    """The batch has 2 samples for each of 4 replicas."""
    config = parse(*flags.split(), *(["--global-batch-size", "8"] if "rampup" in flags else []))
    with pytest.raises(InputError) as error:
        check_layout(config, 4 if "rampup" not in flags else 2)
    assert str(error.value) == f"{message}; raise it or lower the batch size"


def write_corpus(prefix: Path, documents: int) -> Path:
    """Write documents of 10 tokens."""
    rng = np.random.default_rng(documents)
    with IndexedDatasetWriter(str(prefix), np.uint16) as writer:
        for _ in range(documents):
            writer.add_document([rng.integers(300, size=10).astype(np.uint16)])
    return prefix


@pytest.mark.parametrize("blend", [False, True])
def test_epochs(pretrain, tmp_path: Path, blend: bool) -> None:
    """400 tokens make 49 samples, 800 tokens 99."""
    one, two = write_corpus(tmp_path / "one", 40), write_corpus(tmp_path / "two", 80)
    data = ["--data-path", *([0.5, one, 0.5, two] if blend else [one]), "--split", "1,0,0"]
    out = pretrain(*TINY, *data, "--train-epochs", 1.5, "--log-interval", 1)
    per_epoch = 148 if blend else 49
    samples = int(1.5 * per_epoch)
    assert f"--train-epochs 1.5: {samples} samples, {per_epoch} in an epoch\n" in out
    assert f"  {samples // 2}/{samples // 2}  loss " in out


def test_a_fraction_of_an_epoch_is_exact(pretrain, tmp_path: Path) -> None:
    """0.29 x 100 is less than 29 in float64. The files have 49 and 51 samples."""
    data = [0.5, write_corpus(tmp_path / "one", 40), 0.5, write_corpus(tmp_path / "two", 41)]
    out = pretrain(*TINY, "--data-path", *data, "--split", "1,0,0", "--train-epochs", 0.29)
    assert "--train-epochs 0.29: 29 samples, 100 in an epoch\n" in out


def test_an_epoch_that_begins_with_small_batches(pretrain, tmp_path: Path) -> None:
    """Its 49 samples are less than the last batch, but not than the first."""
    ramp = ["--rampup-batch-size", 8, 8, 100, "--global-batch-size", 64]
    data = ["--data-path", write_corpus(tmp_path / "one", 40), "--split", "1,0,0"]
    assert "49 samples, 49 in an epoch\n" in pretrain(*TINY, *data, *ramp, "--train-epochs", 1)


def test_data_without_epochs(pretrain, tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"^--train-epochs: 2 has no meaning with --mock-data; use --train-iters$"
    ):
        pretrain(*TINY, "--mock-data", "--train-epochs", 2)
    one = write_corpus(tmp_path / "one", 2)
    with pytest.raises(
        InputError, match=r"^--train-epochs: 0.5 of the 2 samples of an epoch is less than a batch of 2$"
    ):
        pretrain(*TINY, "--data-path", one, "--split", "1,0,0", "--train-epochs", 0.5)
