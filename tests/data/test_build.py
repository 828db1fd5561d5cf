from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron.data.blend import blend_order
from megatron.data.build import build_gpt_datasets
from megatron.data.config import DataConfig
from megatron.data.indexed import IndexedDataset
from megatron.flags import InputError


def build(samples=(40, 4, 0), vocab_size=10_000, seed=7, eod=None, **flags):
    config = DataConfig(**{"seq_length": 8} | flags)
    return build_gpt_datasets(config, samples=samples, seed=seed, vocab_size=vocab_size, eod=eod)


def texts(dataset) -> list[list[int]]:
    return [dataset[i]["text"].tolist() for i in range(len(dataset))]


def test_parts_share_no_document(corpus: IndexedDataset, tmp_path: Path) -> None:
    train, valid, test = build(data_path=[corpus.prefix], split="6,2,2", samples=(40, 9, 9))
    seen = [{token for text in texts(part) for token in text} for part in (train, valid, test)]
    assert not seen[0] & seen[1] | seen[0] & seen[2] | seen[1] & seen[2]
    assert len(train) >= 40
    assert len(valid) >= 9
    assert (tmp_path / "index-cache").is_dir()


def test_parts_that_nothing_is_wanted_of(corpus: IndexedDataset, caplog) -> None:
    assert build(data_path=[corpus.prefix], split="6,2,2", samples=(40, 0, 0))[1:] == (None, None)
    with caplog.at_level(logging.INFO, "megatron"):
        assert build(data_path=[corpus.prefix], split="1", samples=(40, 9, 9))[1:] == (None, None)
    assert "no valid data: --split 1 gives it no documents, so there will be no valid loss" in caplog.text
    with caplog.at_level(logging.INFO, "megatron"):
        build(train_data_path=[corpus.prefix], samples=(40, 0, 9))
    assert "no test data: --test-data-path is not given" in caplog.text


def test_more_samples_than_an_index_can_hold(write: Callable) -> None:
    data = write([[1, 2, 3]] * 20)
    with pytest.raises(InputError, match=r"epochs of this data, need an index of .* lower --train-iters"):
        build(data_path=[data.prefix], split="1", samples=(10**13, 0, 0))


def test_the_default_split_of_a_small_file(write: Callable, caplog) -> None:
    data = write([[1, 2, 3]] * 20)
    with caplog.at_level(logging.INFO, "megatron"):
        train, valid, test = build(data_path=[data.prefix], samples=(1, 1, 5))
    assert train and valid and test is None
    assert "no test data: --split 969, 30, 1 (the default) gives it no documents" in caplog.text


def test_an_empty_part_that_something_is_wanted_of(write: Callable, tmp_path: Path) -> None:
    data = write([[1, 2, 3]] * 20)
    with pytest.raises(
        InputError,
        match=r"--split 969,30,1: gives 'test' 0 of the 20 documents of .*, with 0 tokens, but 5 s",
    ):
        build(data_path=[data.prefix], split="969,30,1", samples=(1, 1, 5))
    empty = write([[]], "empty")
    with pytest.raises(
        InputError, match=r"--train-data-path: gives 'train' 1 of the 1 documents of .*empty, with 0 t"
    ):
        build(train_data_path=[empty.prefix], samples=(1, 0, 0))
    with pytest.raises(InputError, match=r"--train-data-path: .* of the 1 documents of .*empty"):
        build(train_data_path=["1", data.prefix, "1", empty.prefix], samples=(1, 0, 0))


def test_blend(write: Callable) -> None:
    datasets = [write([np.arange(100) + 1000 * i] * 6, f"part{i}") for i in range(3)]
    paths = [value for i, d in enumerate(datasets) for value in (str([2, 3, 5][i]), d.prefix)]
    train, valid, _ = build(data_path=paths, split="1,1,0", samples=(200, 10, 0))
    assert (len(train), len(valid)) == (200, 10)
    assert [text[0] // 1000 for text in texts(train)] == blend_order([2, 3, 5], 200)[0].tolist()
    for i, d in enumerate(datasets):
        alone = build(
            data_path=[d.prefix], split="1,1,0", samples=(math.ceil(20 * [2, 3, 5][i] * 1.005), 0, 0)
        )
        expected = [text for text in texts(train) if text[0] // 1000 == i]
        assert texts(alone[0])[: len(expected)] == expected


def test_blend_by_size(write: Callable) -> None:
    datasets = [write([np.arange(50) + 1000 * i] * (i + 1), f"part{i}") for i in range(3)]
    train = build(train_data_path=[d.prefix for d in datasets], samples=(60, 0, 0))[0]
    assert np.bincount([text[0] // 1000 for text in texts(train)]).tolist() == [10, 20, 30]


def test_own_paths(corpus: IndexedDataset, write: Callable, tmp_path: Path) -> None:
    other = write([np.arange(3000, 3050)], "other")
    train, valid, test = build(
        train_data_path=[corpus.prefix],
        valid_data_path=[other.prefix],
        data_cache_path=str(tmp_path / "elsewhere"),
        samples=(40, 5, 5),
    )
    assert max(map(max, texts(train))) < 3000 <= min(map(min, texts(valid)))
    assert test is None
    assert list((tmp_path / "elsewhere").glob("*.npy"))
    assert not (tmp_path / "index-cache").exists()


def test_mock_data(tmp_path: Path) -> None:
    train, valid, test = build(mock_data=True, samples=(30, 10, 0), vocab_size=50)
    assert (len(train), len(valid), test) == (30, 10, None)
    assert texts(train) == texts(build(mock_data=True, samples=(30, 10, 0), vocab_size=50)[0])
    assert texts(train)[:10] != texts(valid)
    assert max(map(max, texts(train))) < 50


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"data_path": ["a"], "train_data_path": ["b"]},
            "--train-data-path and --data-path exclude each other",
        ),
        ({"split": "1,1,1", "valid_data_path": ["b"]}, "--valid-data-path and --split exclude each other"),
        ({"mock_data": True, "data_path": ["a"]}, "--data-path and --mock-data exclude each other"),
        ({}, "no data to train on: give --data-path"),
        ({"data_path": ["a"], "seq_length": None}, "--seq-length is required"),
        ({"data_path": ["a"], "reset_position_ids": True}, "need a tokenizer with an end-of-document token"),
        ({"data_path": ["/no/such/file"]}, r"/no/such/file\.idx does not exist"),
    ],
)
def test_wrong_flags(flags: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        build(**flags)
