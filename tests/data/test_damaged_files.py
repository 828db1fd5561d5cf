"""Token files truncated or altered at random: reading gives an error of one line or, if only ids changed, data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron.data.bert_dataset import build_bert_datasets
from megatron.data.config import DataConfig
from megatron.data.gpt_dataset import build_gpt_datasets
from megatron.data.indexed import IndexedDataset
from megatron.errors import InputError
from megatron.tokenizer import Tokenizer


def read_everything(prefix: str) -> None:
    dataset = IndexedDataset(prefix)
    for i in range(len(dataset)):
        dataset.get(i)
    config = DataConfig(data_path=(prefix,), split="8,1,1", seq_length=16)
    for part in build_gpt_datasets(config, samples=(30, 3, 3), seed=1, vocab_size=2000).values():
        for i in range(len(part)):
            assert len(part[i]["text"]) == 17


def truncate_and_flip(corpus: IndexedDataset, extension: str, read: Callable[[str], None]) -> None:
    """Damage a file in a hundred ways; reading it gives data or an error of one line."""
    rng = np.random.RandomState(0)
    file = Path(corpus.prefix + extension)
    good = file.read_bytes()
    refused = 0
    for trial in range(100):
        data = bytearray(good)
        if trial % 2:
            data = data[: rng.randint(len(data))]
        else:
            for _ in range(rng.randint(1, 4)):
                data[rng.randint(len(data))] ^= 1 << rng.randint(8)
        file.write_bytes(data)
        try:
            read(corpus.prefix)
        except InputError as error:
            refused += 1
            assert "\n" not in str(error)
            assert "corpus" in str(error)
    assert refused >= 50


@pytest.mark.parametrize("extension", [".idx", ".bin"])
def test_gpt_data(corpus: IndexedDataset, extension: str) -> None:
    truncate_and_flip(corpus, extension, read_everything)


@pytest.mark.parametrize("extension", [".idx", ".bin"])
def test_bert_data(sentences: IndexedDataset, extension: str, bert_tokenizer: Tokenizer) -> None:
    def read(prefix: str) -> None:
        config = DataConfig(data_path=(prefix,), split="6,2,2", seq_length=16)
        datasets = build_bert_datasets(config, samples=(30, 3, 3), seed=1, tokenizer=bert_tokenizer)
        for part in datasets.values():
            for i in range(len(part)):
                assert part[i]["text"].shape == (16,)

    truncate_and_flip(sentences, extension, read)
