"""Splits and blends in Megatron-LM's order, against its own code of v2.5 and of HEAD in August 2026."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import pytest

from megatron.data.bert_dataset import build_bert_datasets
from megatron.data.config import DataConfig
from megatron.data.gpt_dataset import build_gpt_datasets
from megatron.data.indexed_writer import IndexedDatasetWriter
from megatron.data.split import DATA_ORDERS, parse_split
from megatron.errors import InputError
from megatron.tokenizer.null import NullTokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three files of 61, 37 and 143 documents of 0 to 49 tokens, which count up from 0, 10,000 and 20,000."""
    folder = tmp_path_factory.mktemp("data")
    for k, documents in enumerate((61, 37, 143)):
        sizes = np.random.RandomState(k).randint(0, 50, size=documents)
        with IndexedDatasetWriter(folder / str(k), np.uint16) as writer:
            for size, end in zip(sizes, 10000 * k + np.cumsum(sizes), strict=True):
                writer.add_document([np.arange(end - size, end)])
    return folder


TEN = "0.1 0 0.1 1 0.1 2 0.1 0 0.1 1 0.1 2 0.1 0 0.1 1 0.1 2 0.1 0"
# --data-path, --split, --seq-length, --seed and samples; then, for training, validation and test data, the first token
# of the first, second and last sample, and the CRC-32 of all tokens as int64.
BOTH = [
    (
        ("0", "7,2,1", 8, 1234, (100, 40, 10)),
        ((688, 134, 11, 397074142), (1105, 1097, 1075, 1905035779), (1334, 1314, 1191, 2182919795)),
    ),
    (
        ("0", "5.5,2.5,2", 17, 1, (260, 30, 20)),
        ((179, 385, 624, 3726081574), (886, 905, 752, 3994033994), (1243, 1118, 1281, 810179877)),
    ),
    # A single dataset with a weight is a blend too.
    (
        ("1.0 2", "7,2,1", 8, 1234, (398, 110, 90)),
        (
            (20305, 22248, 20772, 1282631982),
            (22656, 22716, 23274, 770096098),
            (23588, 23542, 23696, 2784412153),
        ),
    ),
]
V2_5 = [
    (
        ("0", "1,1,1", 8, 3, (150, 140, 140)),
        ((366, 5, 170, 38624040), (828, 820, 761, 366468535), (1072, 1239, 1099, 2306028618)),
    ),
    (
        ("0.3 0 0.7 1", "8,1,1", 16, 7, (500, 90, 75)),
        ((10140, 258, 10471, 2669820904), (10627, 1129, 10682, 2528830905), (10717, 1236, 1206, 3535840586)),
    ),
    (
        ("2 2 3 0 5 1", "60,25,15", 32, 42, (257, 96, 24)),
        ((10031, 89, 20751, 880243757), (10622, 863, 10531, 2992176726), (10651, 1304, 10679, 3667843993)),
    ),
    (
        (TEN, "1,1,1", 8, 9, (1000, 200, 200)),
        ((417, 10075, 69, 3120788491), (752, 10303, 543, 1797945449), (1202, 10591, 1008, 2082169577)),
    ),
]
HEAD = [
    (
        ("0", "1,1,1", 8, 3, (150, 140, 140)),
        ((445, 347, 29, 1438164161), (617, 712, 644, 384356821), (1072, 1239, 1099, 2306028618)),
    ),
    (
        ("0.3 0 0.7 1", "8,1,1", 16, 7, (500, 90, 75)),
        ((10339, 258, 10238, 982483793), (10681, 1129, 10621, 2208891141), (10717, 1236, 1206, 3535840586)),
    ),
    (
        ("2 2 3 0 5 1", "60,25,15", 32, 42, (257, 96, 24)),
        ((10031, 89, 20751, 880243757), (10622, 863, 10531, 2992176726), (10651, 1254, 10679, 1539916501)),
    ),
    (
        (TEN, "1,1,1", 8, 9, (1000, 200, 200)),
        ((313, 10152, 188, 4062065682), (673, 10216, 487, 119019802), (1202, 10591, 1008, 2082169577)),
    ),
    (
        ("0 1 2", "6,3,1", 8, 5, (420, 200, 60)),
        ((21281, 76, 22044, 2037686132), (23165, 1043, 1011, 3699168278), (23670, 1259, 23361, 1842157392)),
    ),
]
CASES = [(order, *case) for order, cases in (("v2.5", BOTH + V2_5), ("head", BOTH + HEAD)) for case in cases]


def config(folder: Path, path: str, split: str, seq_length: int, order: str, cache: Path) -> DataConfig:
    words = path.split()
    weighted = len(words) % 2 == 0
    data_path = [word if weighted and i % 2 == 0 else str(folder / word) for i, word in enumerate(words)]
    return DataConfig(
        data_path=data_path, split=split, seq_length=seq_length, data_order=order, data_cache_path=str(cache)
    )


@pytest.mark.parametrize(("order", "run", "expected"), CASES)
def test_samples_equal_megatron(
    order: str, run: tuple, expected: tuple, folder: Path, tmp_path: Path
) -> None:
    path, split, seq_length, seed, samples = run
    data = config(folder, path, split, seq_length, order, tmp_path)
    datasets = build_gpt_datasets(data, samples=samples, seed=seed, vocab_size=30000)
    for dataset, count, numbers in zip(datasets.values(), samples, expected, strict=True):
        texts = np.array([dataset[i]["text"] for i in range(count)])
        assert texts[[0, 1, -1], 0].tolist() == list(numbers[:3])
        assert zlib.crc32(texts.astype("<i8").tobytes()) == numbers[3]


@pytest.mark.parametrize(
    ("split", "size", "bounds"),
    [
        ("969, 30, 1", 1000, [0, 969, 999, 1000]),
        ("949,50,1", 999, [0, 948, 998, 999]),
        ("1,1,1", 61, [0, 20, 41, 61]),
        ("1,1,1", 10, [0, 3, 7, 10]),
        ("98,2,0", 7, [0, 7, 7, 7]),
        ("1,1,2", 2, [0, 0, 1, 2]),
    ],
)
def test_split_bounds_of_head(split: str, size: int, bounds: list[int]) -> None:
    assert DATA_ORDERS["head"](parse_split(split), size) == bounds


def test_too_short_blend_without_weights(folder: Path, tmp_path: Path) -> None:
    data = config(folder, "0 1 2", "6,3,1", 8, "head", tmp_path)
    with pytest.raises(
        InputError,
        match=r"^--split 6,3,1: --data-order head reads a blend .* once, which gives 420 s.* 'train' needs 421;",
    ):
        build_gpt_datasets(data, samples=(421, 0, 0), seed=5, vocab_size=30000)
    longer = config(folder, "0 1 2", "6,3,1", 8, "v2.5", tmp_path)
    assert len(build_gpt_datasets(longer, samples=(421, 0, 0), seed=5, vocab_size=30000)["train"]) == 421


def test_head_order_is_for_gpt_only() -> None:
    data = DataConfig(mock_data=True, seq_length=32, data_order="head")
    with pytest.raises(InputError, match=r"^--data-order: head applies to GPT, not to BERT"):
        build_bert_datasets(data, samples=(1, 0, 0), seed=1, tokenizer=NullTokenizer(100))
