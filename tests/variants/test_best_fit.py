"""Best-fit packing, against packing piece by piece and the tokens of the documents."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import megatron.plugins  # noqa: F401 (registers best-fit packing)
from megatron.arguments import parse_run_config
from megatron.data.bert_dataset import build_bert_datasets
from megatron.data.config import DataConfig
from megatron.data.gpt_dataset import build_gpt_datasets
from megatron.data.indexed import IndexedDataset
from megatron.data.indexed_writer import IndexedDatasetWriter
from megatron.errors import InputError
from megatron.planner.dry_run import longest_batch
from megatron.pretrain_gpt import DEFAULTS, GPT
from megatron.tokenizer.null import NullTokenizer
from megatron.variants.best_fit import (
    PIECE_BYTES,
    SAMPLE_BYTES,
    BestFitDataset,
    build_index,
    cut_documents,
    load_or_build,
    pack,
)
from megatron.verify.shrink import shrink

EOD, VOCAB = 0, 5000


def best_fit_decreasing(lengths: list[int], capacity: int) -> list[int]:
    """Space that is left in each bin, by the textbook's loop."""
    spaces: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [i for i, space in enumerate(spaces) if space >= length]
        if fitting:
            spaces[min(fitting, key=lambda i: spaces[i])] -= length
        else:
            spaces.append(capacity - length)
    return sorted(spaces)


@pytest.mark.parametrize("seed", range(8))
def test_packs_as_piece_by_piece(seed: int) -> None:
    rng = np.random.RandomState(seed)
    capacity = int(rng.randint(4, 200))
    lengths = np.clip(rng.exponential(capacity / 5, size=600).astype(np.int64), 2, capacity)
    bins = pack(lengths, capacity)
    used = np.bincount(bins, weights=lengths)
    assert used.min() > 0 and used.max() <= capacity
    assert sorted((capacity - used).astype(int)) == best_fit_decreasing(lengths.tolist(), capacity)


def test_known_packings() -> None:
    """Pieces that fill their bins exactly, and copies of one that does not."""
    assert len(set(pack(np.array([6, 4, 7, 3, 5, 5, 8, 2]), 10))) == 4
    assert np.bincount(pack(np.full(7, 3), 10)).tolist() == [3, 3, 1]
    # 6 and 4 share a bin, though 7 came first and has space too.
    assert pack(np.array([7, 6, 3, 4]), 10).tolist() == [0, 1, 0, 1]


def write(path: Path, sizes: list[int]) -> IndexedDataset:
    """Documents whose ids count up through all of them, with `EOD` at their ends."""
    first = 1
    with IndexedDatasetWriter(path, np.uint16) as writer:
        for size in sizes:
            ids = np.arange(first, first + size)
            ids[-1:] = EOD
            writer.add_document([ids])
            first += size
    return IndexedDataset(path)


def datasets(tmp_path: Path, samples: int = 10, seed: int = 3, **fields: object) -> BestFitDataset:
    config = DataConfig(
        train_data_path=(str(tmp_path / "corpus"),), seq_length=16, packing="best-fit", **fields
    )
    found = build_gpt_datasets(config, samples=(samples, 0, 0), seed=seed, vocab_size=VOCAB, eod=EOD)["train"]
    assert isinstance(found, BestFitDataset)
    return found


SIZES = [*np.random.RandomState(2).randint(0, 60, size=80).tolist(), 17, 18, 33, 34, 1, 0, 2]


def test_each_token_is_predicted_once_in_an_epoch(tmp_path: Path) -> None:
    """Labels that count are all tokens but the first of each document, after the token before it."""
    tokens = write(tmp_path / "corpus", SIZES)
    dataset, found = datasets(tmp_path), Counter()
    packed = len(list(dataset.index)[2]) - 1
    for i in range(packed):
        batch = dataset.collate([dataset[i]])
        assert batch.tokens.shape == (1, 16)
        for token, label, weight in zip(
            batch.tokens[0].tolist(), batch.labels[0].tolist(), batch.loss_mask[0].tolist(), strict=True
        ):
            found[token, label] += int(weight)
    expected = Counter()
    for i in range(len(SIZES)):
        ids = tokens.get(i).tolist()
        expected.update(itertools.pairwise(ids))
    assert +found == expected


def test_documents_that_fit_are_whole() -> None:
    sizes = np.array(SIZES, dtype=np.int32)
    sequences, offsets, lengths = cut_documents(sizes, range(len(sizes)), 16)
    for i, size in enumerate(SIZES):
        pieces = sorted(
            (int(a), int(n)) for a, n in zip(offsets[sequences == i], lengths[sequences == i], strict=True)
        )
        if size < 2:
            assert pieces == []
        elif size <= 17:
            assert pieces == [(0, size)]
        else:
            assert all(n == 17 for _, n in pieces[:-1]) and sum(n - 1 for _, n in pieces) == size - 1


def test_batch_of_pieces(tmp_path: Path) -> None:
    """Documents of 5, 7 and 30 tokens: the last one's pieces are 17 and 14 long, and nothing ends at 17."""
    write(tmp_path / "corpus", [5, 7, 30])
    dataset = datasets(tmp_path, reset_position_ids=True, reset_attention_mask=True)
    samples = {tuple(dataset[i]["lengths"].tolist()): i for i in range(2, 0, -1)} | {
        tuple(dataset[i]["lengths"].tolist()): i for i in range(len(dataset))
    }
    (small,) = [lengths for lengths in samples if sorted(lengths) == [5, 7]]
    assert set(samples) == {(17,), (14,), small}
    batch = dataset.collate([dataset[samples[key]] for key in ((17,), (14,), small)])
    first, rest = small
    assert batch.loss_mask.sum(1).tolist() == [16, 13, 10]
    assert batch.loss_mask[2].tolist() == [1] * (first - 1) + [0] + [1] * (rest - 1) + [0] * 5
    assert batch.position_ids[2].tolist() == [*range(first), *range(rest), *range(4)]
    assert batch.document_ids[2].tolist() == [0] * first + [1] * rest + [2] * 4
    assert batch.document_ids[0].tolist() == [0] * 16
    assert batch.tokens[2, 12:].unique().tolist() == [1]  # EOD is 0
    assert dataset.collate([]).tokens.shape == (0, 16)


def test_the_order_is_that_of_the_seed_and_does_not_depend_on_the_length_of_the_run() -> None:
    sizes = np.array(SIZES, dtype=np.int32)

    def index(samples: int, seed: int) -> list[np.ndarray]:
        return list(build_index(sizes, range(3, 80), 16, samples, seed))

    short, again, long, other = index(10, 1), index(10, 1), index(400, 1), index(10, 2)
    packed = len(short[2]) - 1
    assert all(np.array_equal(a, b) for a, b in zip(short, again, strict=True))
    assert all(np.array_equal(a, b) for a, b in zip(short[:3], long[:3], strict=True))
    assert len(long[3]) % packed == 0 and len(long[3]) >= 400
    assert np.array_equal(long[3][:packed], short[3])
    for epoch in long[3].reshape(-1, packed):
        assert sorted(epoch) == list(range(packed))
    assert not np.array_equal(long[3][:packed], long[3][packed : 2 * packed])
    assert not np.array_equal(short[0], other[0])
    assert short[0].min() >= 3 and short[0].max() < 80


def test_the_index_is_cached_and_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "corpus", [16, 16, 40, 1])
    with caplog.at_level(logging.INFO, logger="megatron"):
        first = datasets(tmp_path)
        (line,) = [r.getMessage() for r in caplog.records if "best-fit" in r.getMessage()]
        again, other = datasets(tmp_path), datasets(tmp_path, seed=4)
    # The pieces of 40 tokens are 17, 17 and 8 long. Concatenated and cut at 16, 32, 48 and 64, only the third is cut.
    assert line.endswith(
        "best-fit packing: 4 documents of 73 tokens in 5 samples; documents cut: 1 (concatenated: 1); "
        "padding: 12.94% (one document per sample: 12.94%)"
    )
    assert len([r for r in caplog.records if "best-fit" in r.getMessage()]) == 2
    assert first.index.paths == again.index.paths != other.index.paths


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: datasets(path), "--packing best-fit: no document of .*corpus has two tokens"),
        (lambda path: DataConfig(packing="best-fit", mock_data=True), "--packing best-fit and --mock-data"),
        (
            lambda path: build_bert_datasets(
                DataConfig(packing="best-fit", seq_length=16),
                samples=(1, 0, 0),
                seed=1,
                tokenizer=NullTokenizer(10),
            ),
            "--packing: best-fit applies to GPT",
        ),
    ],
)
def test_refusals(tmp_path: Path, make: object, message: str) -> None:
    write(tmp_path / "corpus", [1, 1, 1])
    with pytest.raises(InputError, match=message):
        make(tmp_path)


def test_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = np.maximum(np.random.RandomState(1).exponential(200, size=100_000), 2).astype(np.int32)
    pieces, samples = len(sizes) + int(sizes.sum()) // 2048, 40_000
    tracemalloc.start()
    build_index(sizes, range(len(sizes)), 2048, samples, 1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < PIECE_BYTES * pieces + SAMPLE_BYTES * samples + (1 << 20)

    class Request:
        dataset = dataclasses.make_dataclass("Tokens", ["prefix", "sizes"])("corpus", sizes)
        documents, split, samples, seed = range(len(sizes)), "train", 10**15, 1

    with pytest.raises(InputError, match="need an index of"):
        load_or_build(Request(), 2048)


def test_other_programs_take_a_run_with_it() -> None:
    """`megatron verify` and a dry run have synthetic data, which is not packed."""
    flags = """
        --data-path corpus --packing best-fit --tokenizer-type NullTokenizer --vocab-size 59 --num-layers 2
        --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 --train-iters 20 --lr 2e-3
    """
    config = parse_run_config(flags.split(), description="", defaults=DEFAULTS)
    small = shrink(config, 1, 1, 2)
    assert small.config.data.packing == "concatenated"
    assert not any("packing" in change for change in small.changes)
    assert longest_batch(config, GPT, 60).tokens.shape == (2, 16)
