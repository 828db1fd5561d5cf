"""From the data flags to the training, validation and test data sets."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
from typing import TypeAlias

import numpy as np

from megatron.data.blend import BlendedDataset, load_or_build_order, parse_blend
from megatron.data.config import DataConfig
from megatron.data.gpt_dataset import GPTDataset, MockDataset
from megatron.data.gpt_index import load_or_build
from megatron.data.indexed import IndexedDataset
from megatron.data.split import DEFAULT_SPLIT, parse_split, split_bounds
from megatron.flags import InputError

logger = logging.getLogger("megatron")

Dataset: TypeAlias = GPTDataset | MockDataset | BlendedDataset
NAMES = ("train", "valid", "test")
# Each data set of a blend is asked for this many times its share, as Megatron-LM does; how many epochs that
# takes, and so the order of its samples, depends on it.
SURPLUS = 1.005


@dataclasses.dataclass(frozen=True)
class Part:
    """The data of one part: train, valid or test.

    Attributes:
        name: which part.
        reason: what decided which documents are in it, for messages.
        datasets: the data sets it draws from.
        documents: which sequences of each.
        weights: how often it draws from each; None is by their tokens.
    """

    name: str
    reason: str
    datasets: list[IndexedDataset]
    documents: list[range]
    weights: list[float] | None


def build_gpt_datasets(
    config: DataConfig,
    *,
    samples: tuple[int, int, int],
    seed: int,
    vocab_size: int,
    eod: int | None = None,
) -> tuple[Dataset | None, Dataset | None, Dataset | None]:
    """The training, validation and test data sets that the flags describe.

    Args:
        samples: how many samples of each are wanted at least. Where it is 0, or the user gave validation or
            testing no data (a share of 0 in --split, or no path), the data set is None.
        seed: of the order of the samples.
        vocab_size: token ids are below this.
        eod: id of the end-of-document token; None if the tokenizer has none.

    Raises:
        InputError: a file is missing or damaged, a flag is wrong, or there are too few documents.
    """
    config.require("seq_length")
    if config.needs_eod and eod is None:
        raise InputError(
            "--reset-position-ids, --reset-attention-mask and --eod-mask-loss need a tokenizer with an "
            "end-of-document token; this one has none"
        )
    if config.mock_data:
        train, valid, test = (_mock(config, i, n, seed, vocab_size) for i, n in enumerate(samples))
        return train, valid, test
    parts = _parts(config)
    if parts[0] is None and samples[0] > 0:
        raise InputError("no data to train on: give --data-path, --train-data-path or --mock-data")
    datasets: list[Dataset | None] = []
    for name, part, count in zip(NAMES, parts, samples, strict=True):
        if part is None and count > 0:
            logger.info(f"no {name} data: {_why_none(config, name)}, so there will be no {name} loss")
        datasets.append(None if part is None or count == 0 else _build(part, config, count, seed, vocab_size))
    train, valid, test = datasets
    return train, valid, test


def _why_none(config: DataConfig, name: str) -> str:
    if config.data_path is None:
        return f"--{name}-data-path is not given"
    return f"--split {config.split or f'{DEFAULT_SPLIT} (the default)'} gives it no documents"


def _mock(config: DataConfig, part: int, samples: int, seed: int, vocab_size: int) -> MockDataset | None:
    if samples == 0:
        return None
    return MockDataset(samples, seq_length=config.seq_length, vocab_size=vocab_size, seed=(seed, part))


def _parts(config: DataConfig) -> list[Part | None]:
    """What the flags give to train, valid and test."""
    if config.data_path is not None:
        prefixes, weights = parse_blend(config.data_path, "--data-path")
        datasets = [IndexedDataset(prefix) for prefix in prefixes]
        split = config.split or DEFAULT_SPLIT
        shares = parse_split(split)
        bounds = [split_bounds(shares, len(dataset)) for dataset in datasets]
        parts: list[Part | None] = []
        for i, name in enumerate(NAMES):
            documents = [range(b[i], b[i + 1]) for b in bounds]
            # The default split may leave a small data set nothing to test on; a split that was given may not.
            wanted = shares[i] > 0 and (i == 0 or config.split is not None or any(documents))
            parts.append(Part(name, f"--split {split}", datasets, documents, weights) if wanted else None)
        return parts
    parts = []
    paths = (config.train_data_path, config.valid_data_path, config.test_data_path)
    for name, values in zip(NAMES, paths, strict=True):
        if values is None:
            parts.append(None)
            continue
        flag = f"--{name}-data-path"
        prefixes, weights = parse_blend(values, flag)
        datasets = [IndexedDataset(prefix) for prefix in prefixes]
        parts.append(Part(name, flag, datasets, [range(len(d)) for d in datasets], weights))
    return parts


def _build(part: Part, config: DataConfig, samples: int, seed: int, vocab_size: int) -> Dataset:
    """The data set of one part, blended if it draws from several."""
    tokens = [
        int(dataset.sizes[documents.start : documents.stop].sum(dtype=np.int64))
        for dataset, documents in zip(part.datasets, part.documents, strict=True)
    ]
    weights = tokens if part.weights is None else part.weights
    drawn = [i for i, weight in enumerate(weights) if weight > 0]
    for i in drawn or [0]:
        if tokens[i] == 0:
            raise InputError(
                f"{part.reason}: gives '{part.name}' {len(part.documents[i]):,} of the "
                f"{len(part.datasets[i]):,} documents of {part.datasets[i].prefix}, with 0 tokens, but {samples:,} "
                "samples of it are wanted; give it more documents, or none (a share of 0, or no path)"
            )
    total = sum(weights[i] for i in drawn)
    shares = [weights[i] / total for i in drawn]
    counts = [samples] if len(drawn) == 1 else [math.ceil(samples * share * SURPLUS) for share in shares]
    datasets = []
    for i, count in zip(drawn, counts, strict=True):
        index = load_or_build(
            part.datasets[i],
            part.documents[i],
            name=part.name,
            seq_length=config.seq_length,
            samples=count,
            seed=seed,
            cache=_cache_folder(config, part.datasets[i]),
        )
        datasets.append(GPTDataset(part.datasets[i], index, vocab_size))
    if len(datasets) == 1:
        return datasets[0]
    cache = _cache_folder(config, part.datasets[drawn[0]])
    return BlendedDataset(datasets, load_or_build_order(shares, samples, name=part.name, cache=cache))


def _cache_folder(config: DataConfig, dataset: IndexedDataset) -> str:
    return config.data_cache_path or os.path.join(os.path.dirname(dataset.prefix), "index-cache")
