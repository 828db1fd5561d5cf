"""The size of the run against that of data and model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data.bert_dataset import BertDataset
from megatron.data.config import DataConfig
from megatron.data.gpt_dataset import build_gpt_datasets
from megatron.data.indexed import IndexedDataset
from megatron.data.indexed_writer import IndexedDatasetWriter
from megatron.reports.run_size import describe_size

RUN: dict[str, Any] = {"samples": 1000, "seq_length": 8, "parameters": 2000, "causal": True}


def write(prefix: Path, documents: int) -> Path:
    """Write documents of ten tokens."""
    with IndexedDatasetWriter(prefix, "uint16") as writer:
        for _ in range(documents):
            writer.add_document([[1] * 10])
    return prefix


def train(samples: int = 1000, **flags: Any) -> Any:
    config = DataConfig(seq_length=8, **flags)
    return build_gpt_datasets(config, samples=(samples, 0, 0), seed=1, vocab_size=9)["train"]


def test_epochs_and_tokens_per_parameter(tmp_path: Path) -> None:
    """Train on 80 of the 100 documents of the file."""
    file = write(tmp_path / "a", 100)
    data = train(data_path=(str(file),), split="80,10,10")
    assert describe_size(data, **RUN) == [
        "tokens: 8k (1,000 samples x 8), 10 epochs of the 800 of the data, 4 per parameter "
        "(compute-optimal: about 20)"
    ]
    (line,) = describe_size(data, **RUN | {"samples": 25, "causal": False})
    assert line == ("tokens: 200 (25 samples x 8), 0.25 epochs of the 800 of the data, 0.1 per parameter")


def test_each_file_of_a_blend(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", 100), write(tmp_path / "b", 20)
    lines = describe_size(train(train_data_path=("3", str(a), "1", str(b))), **RUN)
    assert ", 6.67 epochs of the 1.2k of the data, " in lines[0]
    assert lines[1:] == [f"  6 epochs of {a}, 1k tokens", f"  10 epochs of {b}, 200 tokens"]


def test_synthetic_data_has_no_epochs() -> None:
    (line,) = describe_size(train(mock_data=True), **RUN)
    assert line.startswith("tokens: 8k (1,000 samples x 8), 4 per parameter")


def test_the_sentences_of_bert(tmp_path: Path) -> None:
    """The samples use the sentences from the third on, of twenty."""
    rows = np.array([[4, 6, 9], [2, 4, 9], [18, 19, 9]])
    data = BertDataset(IndexedDataset(write(tmp_path / "a", 20)), (rows,), None, 1, 8)
    (line,) = describe_size(data, **RUN)
    assert ", 47.1 epochs of the 170 of the data, " in line


def test_other_data_is_not_described() -> None:
    assert describe_size([1, 2], **RUN) == []


@pytest.mark.parametrize("skip", [False, True])
def test_a_run_logs_it_at_its_start(pretrain: Callable[..., str], tmp_path: Path, skip: bool) -> None:
    flags = """
        --num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --micro-batch-size 2 --train-iters 3
        --eval-iters 1 --lr 1e-3 --device cpu --num-workers 0 --ops-backend plain --no-progress --mock-data
        --tokenizer-type NullTokenizer --vocab-size 99
    """.split()
    out = pretrain(*flags, *(["--skip-train", "--load", tmp_path, "--save", tmp_path] if skip else []))
    assert ("tokens: 48 (6 samples x 8), " in out) is not skip
