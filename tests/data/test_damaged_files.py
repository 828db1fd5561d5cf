"""Token files cut short or altered at random: one clear line, or (where other ids result) data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron.data.build import build_gpt_datasets
from megatron.data.config import DataConfig
from megatron.data.indexed import IndexedDataset
from megatron.flags import InputError


def read_everything(prefix: str) -> None:
    dataset = IndexedDataset(prefix)
    for i in range(len(dataset)):
        dataset.get(i)
    config = DataConfig(data_path=(prefix,), split="8,1,1", seq_length=16)
    for part in build_gpt_datasets(config, samples=(30, 3, 3), seed=1, vocab_size=2000):
        for i in range(len(part)):
            assert len(part[i]["text"]) == 17


@pytest.mark.parametrize("extension", [".idx", ".bin"])
def test_cuts_and_flips(corpus: IndexedDataset, extension: str) -> None:
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
            read_everything(corpus.prefix)
        except InputError as error:
            refused += 1
            assert "\n" not in str(error)
            assert "corpus" in str(error)
    assert refused >= 50
