"""Extension of a finished run."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest

from megatron.data.indexed_writer import IndexedDatasetWriter
from megatron.training import loop

TINY = """
    --device cpu --tokenizer-type NullTokenizer --vocab-size 300 --num-workers 0 --num-layers 1 --hidden-size 8
    --num-attention-heads 1 --seq-length 8 --micro-batch-size 4 --lr 1e-2 --eval-iters 0 --split 1,0,0
""".split()


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Token files with 49 samples of 8 tokens in an epoch."""
    rng = np.random.default_rng(1)
    with IndexedDatasetWriter(str(tmp_path / "corpus"), np.uint16) as writer:
        for _ in range(40):
            writer.add_document([rng.integers(300, size=10).astype(np.uint16)])
    return tmp_path / "corpus"


@pytest.mark.parametrize("blend", [False, True])
def test_an_extension_keeps_the_order_of_the_data(
    pretrain, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blend: bool
) -> None:
    """A finished run goes on twice, to several epochs."""
    datasets = []

    def train_batches(dataset, *arguments, **named):
        datasets.append(dataset)
        return original(dataset, *arguments, **named)

    original = loop.train_batches
    monkeypatch.setattr(loop, "train_batches", train_batches)
    data = ["--data-path", *([0.5, corpus, 0.5, corpus] if blend else [corpus])]
    run = [*TINY, *data, "--save", tmp_path / "a", "--load", tmp_path / "a"]
    pretrain(*run, "--train-iters", 5)
    line = "the run was started for 20 samples and extended to 120, which does not change the order of "
    out = pretrain(*run, "--train-iters", 30)
    assert line in out and " (120 samples x " in out
    pretrain(*run, "--train-iters", 60, "--exit-interval", 40)
    pretrain(*run, "--train-iters", 60)
    texts = [[dataset[i]["text"].tolist() for i in range(len(dataset))] for dataset in datasets]
    assert all(len(text) >= 4 * iters for text, iters in zip(texts, (5, 30, 60, 60), strict=True))
    for shorter, longer in itertools.pairwise(texts):
        assert longer[: len(shorter)] == shorter
    if not blend:  # every epoch has all samples, in an order of its own
        assert len({tuple(text) for text in texts[-1][:49]}) == 49
        assert texts[-1][:49] != texts[-1][49:98]


def test_the_learning_rate_of_an_extension_is_noted(pretrain, corpus: Path, tmp_path: Path) -> None:
    """A finished linear decay to 0 goes on at the learning rate of the longer one."""
    run = [*TINY, "--data-path", corpus, "--save", tmp_path / "a", "--load", tmp_path / "a"]
    pretrain(*run, "--train-iters", 10)
    out = pretrain(*run, "--train-iters", 40)
    assert re.search(
        r"\(.*decay samples .* changed from 40 to 160, .*\); using that of the command line", out
    )
    expected = "Learning rate of iteration 11: 0.000E+00 by the checkpoint's, 7.500E-03 by the command line's"
    assert expected in out
