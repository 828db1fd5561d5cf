from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron.data.bert_dataset import BertDataset, build_bert_datasets
from megatron.data.config import DataConfig
from megatron.data.gpt_dataset import build_gpt_datasets
from megatron.data.indexed import IndexedDataset
from megatron.errors import InputError
from megatron.tokenizer.bert import BertWordPieceTokenizer
from megatron.tokenizer.null import NullTokenizer
from megatron.variants.blend import blend_order


def by_split(datasets: dict) -> tuple:
    """Datasets for training, validation and testing; None for an absent one."""
    assert set(datasets) <= {"train", "validation", "test"}
    return tuple(map(datasets.get, ("train", "validation", "test")))


def build(samples=(40, 4, 0), vocab_size=10_000, seed=7, eod=None, **flags):
    config = DataConfig(**{"seq_length": 8} | flags)
    return by_split(build_gpt_datasets(config, samples=samples, seed=seed, vocab_size=vocab_size, eod=eod))


def texts(dataset) -> list[list[int]]:
    return [dataset[i]["text"].tolist() for i in range(len(dataset))]


def test_splits_share_no_document(corpus: IndexedDataset, tmp_path: Path) -> None:
    train, valid, test = build(data_path=[corpus.prefix], split="6,2,2", samples=(40, 9, 9))
    seen = [{token for text in texts(part) for token in text} for part in (train, valid, test)]
    assert not seen[0] & seen[1] | seen[0] & seen[2] | seen[1] & seen[2]
    assert len(train) >= 40
    assert len(valid) >= 9
    assert (tmp_path / "index-cache").is_dir()


def test_splits_without_samples_or_documents(corpus: IndexedDataset, caplog) -> None:
    assert build(data_path=[corpus.prefix], split="6,2,2", samples=(40, 0, 0))[1:] == (None, None)
    with caplog.at_level(logging.DEBUG, "megatron"):
        assert build(data_path=[corpus.prefix], split="1", samples=(40, 9, 9))[1:] == (None, None)
    assert "no valid data: --split 1 gives it no documents; valid loss will not be computed" in caplog.text
    with caplog.at_level(logging.DEBUG, "megatron"):
        build(train_data_path=[corpus.prefix], samples=(40, 0, 9))
    assert "no test data: --test-data-path is not set" in caplog.text


def test_more_samples_than_an_index_can_hold(write: Callable) -> None:
    data = write([[1, 2, 3]] * 20)
    with pytest.raises(InputError, match=r"epochs\) need an index of .* lower --train-iters"):
        build(data_path=[data.prefix], split="1", samples=(10**13, 0, 0))


def test_default_split_of_a_small_file(write: Callable, caplog) -> None:
    data = write([[1, 2, 3]] * 20)
    with caplog.at_level(logging.DEBUG, "megatron"):
        train, valid, test = build(data_path=[data.prefix], samples=(1, 1, 5))
    assert train and valid and test is None
    assert "no test data: --split 969, 30, 1 (the default) gives it no documents" in caplog.text


def test_empty_split_that_needs_samples(write: Callable, tmp_path: Path) -> None:
    data = write([[1, 2, 3]] * 20)
    with pytest.raises(
        InputError,
        match=r"--split 969,30,1: 'test' gets 0 of the 20 documents of .*, with 0 tokens, but needs 5 s",
    ):
        build(data_path=[data.prefix], split="969,30,1", samples=(1, 1, 5))
    with pytest.raises(InputError, match="--split: 0,1,0 leaves no documents to train on"):
        build(data_path=[data.prefix], split="0,1,0", samples=(1, 1, 0))
    empty = write([[]], "empty")
    with pytest.raises(
        InputError, match=r"--train-data-path: 'train' gets 1 of the 1 documents of .*empty, with 0 t"
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


def test_several_prefixes_without_blends(monkeypatch) -> None:
    monkeypatch.setattr("megatron.data.build.SOURCES", [])
    with pytest.raises(InputError, match=r"^--data-path: 2 values; give one prefix$"):
        build(data_path=["a", "b"])


def test_separate_data_paths(corpus: IndexedDataset, write: Callable, tmp_path: Path) -> None:
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
        (
            {"mock_data": True, "mask_prob": 0.2},
            "^--mask-prob: applies to BERT, not to GPT",
        ),
        ({"mock_data": True, "short_seq_prob": 0.0}, "^--short-seq-prob: applies to BERT, not to GPT"),
        (
            {"mock_data": True, "bert_binary_head": False},
            "^--bert-no-binary-head: applies to BERT, not to GPT",
        ),
    ],
)
def test_invalid_flags(flags: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        build(**flags)


# ---- BERT


def build_bert(tokenizer, samples=(40, 4, 0), seed=7, **flags):
    config = DataConfig(**{"seq_length": 32} | flags)
    return by_split(build_bert_datasets(config, samples=samples, seed=seed, tokenizer=tokenizer))


def words_of(dataset) -> set[int]:
    """Ids of all samples, including masked ones."""
    samples = [dataset[i] for i in range(len(dataset))]
    return {id for s in samples for id in np.where(s["loss_mask"], s["labels"], s["text"]).tolist() if id > 4}


@pytest.fixture
def documents(write_documents: Callable) -> IndexedDataset:
    """20 documents of 6 sentences of 7 tokens, in which no id repeats."""
    return write_documents(np.arange(1000, 1840).reshape(20, 6, 7).tolist())


def test_bert_splits_hold_whole_documents(
    documents: IndexedDataset, bert_tokenizer: BertWordPieceTokenizer, tmp_path: Path
) -> None:
    parts = build_bert(bert_tokenizer, (40, 9, 9), data_path=[documents.prefix], split="6,2,2")
    edges = [1000, 1000 + 12 * 42, 1000 + 16 * 42, 1840]
    for part, samples, first, last in zip(parts, (40, 9, 9), edges[:-1], edges[1:], strict=True):
        assert words_of(part) <= set(range(first, last))
        assert len(part) >= samples
    assert len(list((tmp_path / "index-cache").glob("*-map.npy"))) == 3
    train, valid, test = build_bert(
        bert_tokenizer,
        (5, 5, 5),
        train_data_path=[documents.prefix],
        test_data_path=[documents.prefix],
        data_cache_path=str(tmp_path / "elsewhere"),
    )
    assert words_of(train) <= set(range(1000, 1840)) and test is not None and valid is None
    assert len(list((tmp_path / "elsewhere").glob("*-map.npy"))) == 2


def test_bert_samples_depend_on_seed_and_flags(
    documents: IndexedDataset, bert_tokenizer: BertWordPieceTokenizer
) -> None:
    def texts(**flags) -> list[list[int]]:
        train = build_bert(bert_tokenizer, (40, 0, 0), data_path=[documents.prefix], split="1", **flags)[0]
        return [train[i]["text"].tolist() for i in range(40)]

    assert texts() == texts()
    assert texts(seed=8) != texts()
    train = build_bert(bert_tokenizer, data_path=[documents.prefix], split="1", seed=8)[0]
    assert train.seed == 8  # test_bert_dataset.py compares what comes of it with Megatron-LM
    assert texts(mask_prob=0.3) != texts() != texts(short_seq_prob=0.5)
    assert texts(bert_binary_head=False) != texts()


def test_bert_blend(write_documents: Callable, bert_tokenizer: BertWordPieceTokenizer) -> None:
    files = [
        write_documents((np.arange(84).reshape(2, 6, 7) + 5 + 500 * i).tolist(), f"part{i}") for i in range(3)
    ]
    paths = [value for i, file in enumerate(files) for value in (str([2, 3, 5][i]), file.prefix)]
    train = build_bert(bert_tokenizer, (200, 0, 0), data_path=paths, split="1,0,0")[0]
    order = blend_order([2, 3, 5], 200)[0].tolist()
    assert len(train) == 200
    for i, file in enumerate(order):
        sample = train[i]
        whole = np.where(sample["loss_mask"], sample["labels"], sample["text"])
        assert set((whole[whole > 4] // 500).tolist()) == {file}


def test_bert_mock_data(bert_tokenizer: BertWordPieceTokenizer) -> None:
    for tokenizer in (bert_tokenizer, NullTokenizer(50)):
        train, valid, test = build_bert(tokenizer, (30, 10, 0), mock_data=True)
        assert (len(train), len(valid), test) == (30, 10, None)
        assert max(words_of(train)) < tokenizer.vocab_size
        assert train[0]["text"].tolist() != valid[0]["text"].tolist()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({}, "^no data to train on: give --data-path"),
        ({"data_path": ["a"], "seq_length": None}, "^--seq-length is required"),
        (
            {"data_path": ["a"], "eod_mask_loss": True},
            "--eod-mask-loss apply to GPT, .*, not to BERT",
        ),
        ({"data_path": ["/no/such/file"]}, r"^/no/such/file\.idx does not exist"),
        (
            {"mock_data": True, "seq_length": 9},
            "^--seq-length: 9 leaves BERT no token to predict .* at least 10$",
        ),
        ({"mock_data": True, "seq_length": 12, "mask_prob": 0.1}, "^--seq-length: 12 .* at least 13$"),
        ({"mock_data": True, "seq_length": 4, "mask_prob": 1.0}, "^--seq-length: 4 .* at least 5$"),
    ],
)
def test_invalid_bert_flags(flags: dict, message: str, bert_tokenizer: BertWordPieceTokenizer) -> None:
    with pytest.raises(InputError, match=message):
        build_bert(bert_tokenizer, **flags)


@pytest.mark.parametrize(("seq_length", "mask_prob"), [(10, 0.15), (13, 0.1), (8, 0.2), (5, 0.5), (5, 1.0)])
def test_shortest_bert_sequence(
    seq_length: int, mask_prob: float, documents: IndexedDataset, bert_tokenizer: BertWordPieceTokenizer
) -> None:
    flags = {"data_path": [documents.prefix], "split": "1", "seq_length": seq_length, "mask_prob": mask_prob}
    train = build_bert(bert_tokenizer, **flags)[0]
    assert any(train[i]["loss_mask"].any() for i in range(len(train)))


def test_unusable_bert_data(
    write: Callable, write_documents: Callable, bert_tokenizer: BertWordPieceTokenizer
) -> None:
    level = write([[5, 6, 7]] * 20)
    with pytest.raises(
        InputError, match=r"corpus\.idx: the 20 documents for train have at most one sentence each, "
    ):
        build_bert(bert_tokenizer, data_path=[level.prefix], split="1")
    alone = build_bert(bert_tokenizer, data_path=[level.prefix], split="1", bert_binary_head=False)[0]
    assert isinstance(alone, BertDataset) and words_of(alone) == {5, 6, 7}
    few = write_documents([[[5], [6]]] * 20, "few")
    with pytest.raises(
        InputError, match=r"^--split 969,30,1: 'test' gets 0 of the 20 documents of .*few, with 0 tokens"
    ):
        build_bert(bert_tokenizer, (1, 1, 1), data_path=[few.prefix], split="969,30,1")
    with pytest.raises(InputError, match=r"^--tokenizer-type: NullTokenizer has no word boundaries"):
        build_bert(NullTokenizer(50), data_path=[few.prefix])
