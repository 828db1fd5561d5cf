from __future__ import annotations

import logging
import pickle
from pathlib import Path

import numpy as np
import pytest

from megatron.data.config import DataConfig
from megatron.data.gpt_dataset import GPTDataset
from megatron.data.gpt_index import build_indices, load_or_build, plan_epochs
from megatron.data.index_cache import IndexRequest
from megatron.data.indexed import IndexedDataset
from megatron.data.split import DATA_ORDERS, parse_split

NAMES = ("train", "valid", "test")
OWT = "owt60_gpt2_append_eod_text_document"


def reference(sizes: np.ndarray, documents: range, seq_length: int, samples: int, seed: int) -> tuple:
    """Megatron-LM v2.5's indices, built sample by sample."""
    per_epoch = int(sizes[documents.start : documents.stop].sum())
    epochs = 1
    while (epochs * per_epoch - 1) // seq_length < samples:
        epochs += 1
    total = (epochs * per_epoch - 1) // seq_length
    first, separate = total, False
    if epochs > 1:
        before = ((epochs - 1) * per_epoch - 1) // seq_length
        separate = samples - before < int(0.80 * ((per_epoch - 1) // seq_length))
        first = before if separate else total
    rng = np.random.RandomState(seed)
    document_index: list[int] = []
    for count in [epochs - 1, 1] if separate else [epochs]:
        part = np.array(list(documents) * count, dtype=np.int32)
        rng.shuffle(part)
        document_index += part.tolist()
    sample_index = [(0, 0)]
    position = offset = 0
    for _ in range(total):
        need = seq_length + 1
        while need > 0:
            length = int(sizes[document_index[position]]) - offset
            need -= length
            if need <= 0:
                offset += need + length - 1
            else:
                position, offset = position + 1, 0
        sample_index.append((position, offset))
    shuffle_index = np.arange(total, dtype=np.uint32)
    rng.shuffle(shuffle_index[:first])
    if separate:
        rng.shuffle(shuffle_index[first:])
    return document_index, sample_index, shuffle_index


@pytest.mark.parametrize(
    ("samples", "separate", "document", "sample", "shuffle"),
    [
        (4, False, "4 0 1 2 3", "0,0 0,8 2,0 3,5 4,1", "2 1 3 0"),
        (
            12,
            False,
            "3 1 0 2 4 2 0 2 1 4 3 4 0 1 3",
            "0,0 2,0 3,1 3,9 4,5 5,4 6,0 7,1 7,9 9,2 10,1 11,4 12,3 14,1",
            "7 11 2 3 1 9 5 4 0 8 12 6 10",
        ),
        (
            9,
            True,
            "2 2 4 1 0 3 4 0 1 3 0 4 3 2 1",
            "0,0 0,8 1,4 2,0 2,8 4,4 6,0 6,8 8,0 10,0 11,1 12,0 13,3 13,11",
            "1 0 3 5 2 7 4 6 10 11 9 12 8",
        ),
    ],
)
def test_small_examples(samples: int, separate: bool, document: str, sample: str, shuffle: str) -> None:
    plan = plan_epochs(36, 8, samples)
    assert plan.separate_last_epoch == separate
    built = build_indices(np.array([7, 3, 12, 5, 9], np.int32), range(5), 8, plan, 1234)
    assert " ".join(map(str, built[0])) == document
    assert " ".join(f"{position},{offset}" for position, offset in built[1]) == sample
    assert " ".join(map(str, built[2])) == shuffle


@pytest.mark.parametrize("order", ["v2.5", "head"])
@pytest.mark.parametrize(
    ("prefix", "files", "seq_length", "num_samples"),
    [
        (OWT, "index/owt60_text_document", 128, (1000, 100, 10)),
        ("gpt-v2.5/tiny60_text_document", "gpt-v2.5/tiny60_text_document", 64, (24, 4, 4)),
    ],
)
def test_equals_megatron_files(
    shared: Path, prefix: str, files: str, seq_length: int, num_samples, order: str
) -> None:
    dataset = IndexedDataset(shared / "vectors" / prefix)
    bounds = DATA_ORDERS[order](parse_split("900,50,50"), len(dataset))
    for i, (name, samples) in enumerate(zip(NAMES, num_samples, strict=True)):
        documents = range(bounds[i], bounds[i + 1])
        tokens = int(dataset.sizes[documents.start : documents.stop].sum())
        plan = plan_epochs(tokens, seq_length, samples)
        built = build_indices(dataset.sizes, documents, seq_length, plan, 1234)
        for kind, index in zip(("doc", "sample", "shuffle"), built, strict=True):
            file = f"{files}_{name}_indexmap_{samples}ns_{seq_length}sl_1234s_{kind}_idx.npy"
            theirs = np.load(shared / "vectors" / file, allow_pickle=False)
            assert index.dtype == theirs.dtype
            np.testing.assert_array_equal(index, theirs)


def test_samples_equal_megatron(shared: Path, tmp_path: Path) -> None:
    dataset = IndexedDataset(shared / "vectors" / OWT)
    bounds = DATA_ORDERS["v2.5"](parse_split("900,50,50"), len(dataset))
    with np.load(shared / "vectors" / "index" / "owt60_samples.npz", allow_pickle=False) as theirs:
        for i, (name, samples) in enumerate(zip(NAMES, (1000, 100, 10), strict=True)):
            request = IndexRequest(
                dataset=dataset,
                documents=range(bounds[i], bounds[i + 1]),
                split=name,
                samples=samples,
                seed=1234,
                cache=str(tmp_path),
            )
            index = load_or_build(request, 128)
            ours = GPTDataset(tokens=dataset, index=index, config=DataConfig(), vocab_size=50257)
            np.testing.assert_array_equal([ours[j]["text"] for j in range(4)], theirs[name])


@pytest.mark.parametrize("chunk", [3, 1 << 20])
def test_random_data_equals_the_reference(monkeypatch, chunk: int) -> None:
    monkeypatch.setattr("megatron.data.indexed.CHUNK", chunk)
    rng = np.random.RandomState(0)
    separate, epochs = set(), set()
    for seed in range(400):
        sizes = rng.randint(0, rng.choice([2, 5, 50]), size=rng.randint(1, 30)).astype(np.int32)
        start = rng.randint(0, len(sizes))
        documents = range(start, rng.randint(start + 1, len(sizes) + 1))
        tokens = int(sizes[documents.start : documents.stop].sum())
        if tokens == 0:
            continue
        seq_length, samples = rng.randint(1, 40), rng.randint(1, 100)
        plan = plan_epochs(tokens, seq_length, samples)
        built = build_indices(sizes, documents, seq_length, plan, seed)
        for ours, theirs in zip(built, reference(sizes, documents, seq_length, samples, seed), strict=True):
            np.testing.assert_array_equal(ours, theirs)
        separate.add(plan.separate_last_epoch)
        epochs.add(plan.epochs)
    assert separate == {True, False}
    assert len(epochs) > 10


def test_complete_last_epoch() -> None:
    """Samples that span two epochs can give the last epoch one more sample than it has alone."""
    plan = plan_epochs(5, 4, 2)  # one epoch has one sample, and two have exactly two
    assert (plan.epochs, plan.samples) == (2, 2)
    plan = plan_epochs(7, 4, 3)
    assert (plan.epochs, plan.samples) == (2, 3)


def open_index(dataset: IndexedDataset, cache: Path, **changes):
    arguments = {"split": "train", "samples": 100, "seed": 1, "cache": str(cache)} | changes
    seq_length = arguments.pop("seq_length", 8)
    request = IndexRequest(dataset=dataset, documents=range(len(dataset)), **arguments)
    return load_or_build(request, seq_length)


def test_cache_key_covers_all_inputs(corpus: IndexedDataset, write, tmp_path: Path, caplog) -> None:
    cache = tmp_path / "cache"
    with caplog.at_level(logging.DEBUG, "megatron"):
        first = open_index(corpus, cache)
    available = f"{(corpus.num_tokens - 1) // 8:,} samples of 8 tokens"
    assert f"50 documents, {corpus.num_tokens:,} tokens, {available}; needed: 100 samples" in caplog.text
    assert "epochs" not in caplog.text
    with caplog.at_level(logging.DEBUG, "megatron"):
        open_index(corpus, cache, samples=1000)
    times = -(-8001 // corpus.num_tokens)
    assert f"{available}; needed: 1,000 samples, {times} epochs" in caplog.text
    assert open_index(corpus, cache).paths == first.paths
    assert pickle.loads(pickle.dumps(first)).paths == first.paths  # noqa: S301, pickled here
    paths = {first.paths}
    for changes in ({"seq_length": 9}, {"samples": 101}, {"seed": 2}):
        paths.add(open_index(corpus, cache, **changes).paths)
    documents = [corpus.get(i) for i in range(len(corpus))]
    again = write(documents[::-1])  # new files with the same prefix
    paths.add(open_index(again, cache).paths)
    assert len(paths) == 5


def test_damaged_cache_is_rebuilt(corpus: IndexedDataset, tmp_path: Path, caplog) -> None:
    cache = tmp_path / "cache"
    paths = open_index(corpus, cache).paths
    good = [Path(path).read_bytes() for path in paths]
    rng = np.random.RandomState(0)
    for _ in range(100):
        victim = rng.randint(3)
        data = bytearray(good[victim])
        if rng.rand() < 0.5:
            data = data[: rng.randint(len(data))]
        else:
            data[rng.randint(len(data))] ^= 1 << rng.randint(8)
        Path(paths[victim]).write_bytes(data)
        dataset = GPTDataset(
            tokens=corpus, index=open_index(corpus, cache), config=DataConfig(), vocab_size=65536
        )
        for i in range(len(dataset)):
            assert len(dataset[i]["text"]) <= corpus.num_tokens
        for path, content in zip(paths, good, strict=True):
            Path(path).write_bytes(content)
    assert "is damaged; rebuilding the index" in caplog.text
