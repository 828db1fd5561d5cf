from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron.data import bert_index
from megatron.data.bert_index import CutRules, build_map, load_or_build, usable_documents
from megatron.data.index_cache import IndexRequest, MappedArrays
from megatron.data.indexed import IndexedDataset
from megatron.data.mersenne_twister import MersenneTwister64
from megatron.data.split import DATA_ORDERS, parse_split
from megatron.errors import InputError

NAMES = ("train", "valid", "test")


def ours(
    sizes: np.ndarray, bounds: np.ndarray, rules: CutRules, samples: int, seed: int
) -> list[list[int]] | None:
    enough, not_long = usable_documents(sizes, bounds, rules.min_sentences)
    usable = enough & not_long
    if not usable.any():
        return None
    return build_map(sizes, bounds, usable, rules, samples=samples, seed=seed).tolist()


def reference(
    sizes: np.ndarray, bounds: np.ndarray, rules: CutRules, samples: int, seed: int
) -> list[list[int]]:
    """Megatron-LM v2.5's map, built sentence by sentence."""
    rng = np.random.RandomState(seed)

    def draw() -> int:
        if rules.short_every == 0:
            return rules.longest
        word = int(rng.randint(0, 2**32, dtype=np.uint32))
        return 2 + word % (rules.longest - 1) if word % rules.short_every == 0 else rules.longest

    rows: list[list[int]] = []
    while len(rows) < samples:
        for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            left = stop - start
            if left < rules.min_sentences or (left > 1 and (sizes[start:stop] > 512).any()):
                continue
            target, length, count = draw(), 0, 0
            for sentence in range(start, stop):
                length, count, left = length + int(sizes[sentence]), count + 1, left - 1
                if left == 0 or (length >= target and left > 1 and count >= rules.min_sentences):
                    rows.append([start, sentence + 1, target])
                    start, target, length, count = sentence + 1, draw(), 0, 0
    words = MersenneTwister64(seed + 1).draw(len(rows))
    for i, word in zip(range(len(rows) - 1, 0, -1), words.tolist(), strict=False):
        j = word % (i + 1)
        rows[i], rows[j] = rows[j], rows[i]
    return rows


def test_small_example() -> None:
    sizes = np.array([10, 12, 7, 9, 30, 5, 6, 7, 8, 20, 600, 3, 4, 5], np.int32)
    bounds = np.array([0, 4, 5, 9, 14])
    rules = CutRules.of(seq_length=32, short_seq_prob=0.1, binary_head=True)
    assert (rules.longest, rules.short_every, rules.min_sentences) == (29, 10, 2)
    a, b = [0, 4, 29], [5, 9, 29]
    assert ours(sizes, bounds, rules, 6, 1234) == [b, b, a, a, a, b]


def test_equals_megatron_files(shared: Path, tmp_path: Path) -> None:
    folder = shared / "vectors" / "bert-v2.5"
    dataset = IndexedDataset(folder / "bert60_text_sentence")
    bounds = DATA_ORDERS["v2.5"](parse_split("900,50,50"), len(dataset.doc_idx) - 1)
    rules = CutRules.of(seq_length=128, short_seq_prob=0.1, binary_head=True)
    for i, (name, samples) in enumerate(zip(NAMES, (24, 4, 4), strict=True)):
        request = IndexRequest(
            dataset=dataset,
            documents=range(bounds[i], bounds[i + 1]),
            split=name,
            samples=samples,
            seed=1234,
            cache=str(tmp_path),
        )
        (rows,) = load_or_build(request, rules)
        file = f"bert60_text_sentence_{name}_indexmap_{samples}mns_125msl_0.10ssp_1234s.npy"
        theirs = np.load(folder / file, allow_pickle=False)
        assert rows.dtype == theirs.dtype
        np.testing.assert_array_equal(rows, theirs)


@pytest.mark.parametrize("chunk", [3, 1 << 18])
def test_random_data_equals_the_reference(monkeypatch, chunk: int) -> None:
    monkeypatch.setattr(bert_index, "CHUNK", chunk)
    rng = np.random.RandomState(0)
    made = []
    for seed in range(300):
        counts = rng.randint(0, rng.choice([3, 8, 40]), size=rng.randint(1, 25))
        before = rng.randint(0, 20)  # sentences in documents of another split
        sizes = rng.randint(0, rng.choice([3, 30, 200]), size=before + counts.sum() + 5).astype(np.int32)
        sizes[rng.rand(len(sizes)) < rng.choice([0, 0.02])] = 513
        bounds = before + np.concatenate([[0], np.cumsum(counts)])
        rules = CutRules.of(
            seq_length=rng.randint(5, 200),
            short_seq_prob=rng.choice([0, 0.02, 0.1, 0.5, 1]),
            binary_head=bool(rng.randint(2)),
        )
        rows = ours(sizes, bounds, rules, samples := rng.randint(1, 200), seed)
        if rows is not None:
            assert rows == reference(sizes, bounds, rules, samples, seed)
            made.append(len(rows))
    assert len(made) > 250
    assert max(made) > 250


def test_target_lengths() -> None:
    """Share and uniformity of short targets, on documents that take one target each."""
    documents, longest = 100_000, 62
    sizes, bounds = np.full(2 * documents, 3, np.int32), 2 * np.arange(documents + 1)
    rules = CutRules.of(seq_length=longest + 3, short_seq_prob=0.1, binary_head=True)
    usable = np.ones(documents, dtype=bool)
    targets = build_map(sizes, bounds, usable, rules, samples=1, seed=5)[:, 2]
    counts = np.bincount(targets)[2:]
    short = documents * 0.1 / (longest - 1)
    expected = np.array([short] * 60 + [documents * 0.9 + short])
    assert len(counts) == len(expected)
    assert (
        (counts - expected) ** 2 / expected
    ).sum() < 99.6  # chi-square with 60 degrees of freedom, p = 0.001


@pytest.mark.parametrize(
    ("probability", "every"), [(0.1, 10), (0.3, 3), (0.7, 1), (1.0, 1), (0.0, 0), (5e-324, 2**32), (0.4, 3)]
)
def test_short_seq_prob_is_rounded_to_one_in_n(probability: float, every: int) -> None:
    rules = CutRules.of(seq_length=16, short_seq_prob=probability, binary_head=False)
    assert (rules.short_every, rules.min_sentences) == (every, 1)
    sizes, bounds = np.full(20, 3, np.int32), np.array([0, 20])
    assert ours(sizes, bounds, rules, 1, 1) == reference(sizes, bounds, rules, 1, 1)


RULES = CutRules.of(seq_length=32, short_seq_prob=0.1, binary_head=True)


def open_map(dataset: IndexedDataset, cache: Path, rules: CutRules = RULES, **changes) -> MappedArrays:
    whole = range(len(dataset.doc_idx) - 1)
    arguments = {"documents": whole, "split": "train", "samples": 50, "seed": 1, "cache": str(cache)}
    return load_or_build(IndexRequest(dataset=dataset, **arguments | changes), rules)


def test_cache_key_covers_all_inputs(
    sentences: IndexedDataset, write_documents, tmp_path: Path, caplog
) -> None:
    cache = tmp_path / "cache"
    with caplog.at_level(logging.DEBUG, "megatron"):
        first = open_map(sentences, cache)
        assert open_map(sentences, cache).paths == first.paths
    made = len(next(iter(first)))
    (line,) = caplog.messages
    assert "40 documents; skipped: 2 with fewer than 2 sentences, 0 with a sentence of more than" in line
    assert line.endswith(f"samples: {made:,}, needed: 50")
    paths = {first.paths}
    for changes in (
        {"samples": 51},
        {"seed": 2},
        {"documents": range(1, 40)},
        {"rules": CutRules(29, 10, 1)},
        {"rules": CutRules(29, 9, 2)},
        {"rules": CutRules(28, 10, 2)},
    ):
        paths.add(open_map(sentences, cache, **changes).paths)
    write_documents([[[1, 2], [3]]] * 40)  # new files with the same prefix
    paths.add(open_map(IndexedDataset(sentences.prefix), cache).paths)
    assert len(paths) == 8


def test_damaged_cache_is_rebuilt(sentences: IndexedDataset, tmp_path: Path, caplog) -> None:
    cache = tmp_path / "cache"
    (path,) = open_map(sentences, cache).paths
    good = Path(path).read_bytes()
    rng = np.random.RandomState(0)
    for trial in range(100):
        data = bytearray(good)
        if trial % 2:
            data = data[: rng.randint(len(data))]
        else:
            data[rng.randint(len(data))] ^= 1 << rng.randint(8)
        Path(path).write_bytes(data)
        (rows,) = open_map(sentences, cache)
        start, end, target = rows.astype(np.int64).T
        assert len(rows) >= 50 and rows.shape[1] == 3
        assert (start >= 0).all() and (start + 2 <= end).all() and (end <= len(sentences)).all()
        assert (target >= 2).all() and (target <= 29).all()
    assert "is damaged; rebuilding the index" in caplog.text


def test_documents_of_one_sentence_are_refused(
    write: Callable, write_documents: Callable, tmp_path: Path
) -> None:
    data = write([[1, 2, 3]] * 20)
    message = (
        r"corpus\.idx: the 20 documents for train have at most one sentence each, but sentence-order prediction needs "
        r"two; preprocess the text with megatron preprocess --split-sentences, or give --bert-no-binary-head$"
    )
    with pytest.raises(InputError, match=message):
        open_map(data, tmp_path)
    assert len(next(iter(open_map(data, tmp_path, CutRules(29, 10, 1))))) == 60
    assert not list(tmp_path.glob("*.tmp"))


def test_too_long_sentences(write_documents: Callable, tmp_path: Path) -> None:
    long = np.ones(513, dtype=int)
    data = write_documents([[[1]], [[1], [2], long, [3], long]])
    message = r"corpus\.idx: the 2 documents for train with enough .* as sentence 2 of document 1 with 513; "
    with pytest.raises(InputError, match=message):
        open_map(data, tmp_path)
    data = write_documents([[long[:512], long[:512]]])
    assert next(iter(open_map(data, tmp_path, samples=1))).tolist() == [[0, 2, 29]]


def test_index_larger_than_memory(sentences: IndexedDataset, tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"corpus: 10,000,000,000,000 samples need an index of .* lower --tr"
    ):
        open_map(sentences, tmp_path, samples=10**13)
