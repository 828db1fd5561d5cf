"""Build the training, validation and test datasets that the data flags describe, for any kind of sample."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from megatron.data.config import DataConfig
from megatron.data.dataset import Dataset
from megatron.data.index_cache import IndexRequest
from megatron.data.indexed import IndexedDataset
from megatron.data.split import DATA_ORDERS, DEFAULT_SPLIT, parse_split
from megatron.errors import InputError

logger = logging.getLogger("megatron")

# Splits as flags and log lines call them, and as a run calls its datasets.
SPLITS = {"train": "train", "valid": "validation", "test": "test"}


class DatasetBuilder(Protocol):
    """Builder of one kind of dataset."""

    config: DataConfig
    seed: int

    def num_documents(self, file: IndexedDataset) -> int:
        """Return the number of documents in a token file."""

    def num_tokens(self, file: IndexedDataset, documents: range) -> int:
        """Return the number of tokens in a range of documents."""

    def build(self, request: IndexRequest) -> Dataset:
        """Build the dataset of the requested samples."""


@dataclasses.dataclass(frozen=True)
class Split:
    """A split of the data that a flag names.

    Attributes:
        name: "train", "valid" or "test".
        source: flag that selected the documents, for messages.
        documents: number of documents in a file to the range of those in the split.
    """

    name: str
    source: str
    documents: Callable[[int], range]


class Source(Protocol):
    """The data that a flag names: a token file, or what a plug-in makes of several."""

    def has_documents(self, split: Split) -> bool:
        """Return True if the split has any."""

    def build(self, split: Split, samples: int) -> Dataset:
        """Build the dataset of a split. Raises `InputError` if it has no tokens."""


@dataclasses.dataclass(frozen=True)
class TokenFile:
    """A token file, read by the builder of one kind of dataset."""

    builder: DatasetBuilder
    file: IndexedDataset

    def documents(self, split: Split) -> range:
        return split.documents(self.builder.num_documents(self.file))

    def has_documents(self, split: Split) -> bool:
        return bool(self.documents(split))

    def num_tokens(self, split: Split) -> int:
        return self.builder.num_tokens(self.file, self.documents(split))

    def check_tokens(self, split: Split, samples: int) -> None:
        """Raise `InputError` if there are no tokens to make samples of."""
        if self.num_tokens(split) == 0:
            raise InputError(
                f"{split.source}: '{split.name}' gets {len(self.documents(split)):,} of the "
                f"{self.builder.num_documents(self.file):,} documents of {self.file.prefix}, with 0 tokens, but "
                f"needs {samples:,} samples; give it more documents, or none (a share of 0, or no path)"
            )

    @property
    def cache(self) -> str:
        """Folder of the sample indices."""
        folder = self.builder.config.data_cache_path
        return folder or os.path.join(os.path.dirname(self.file.prefix), "index-cache")

    def build(self, split: Split, samples: int) -> Dataset:
        self.check_tokens(split, samples)
        return self.builder.build(
            IndexRequest(
                dataset=self.file,
                documents=self.documents(split),
                split=split.name,
                samples=samples,
                seed=self.builder.seed,
                cache=self.cache,
            )
        )


# Open what a data flag names, (builder, words, flag), unless it is one token file. Filled by `megatron.plugins`.
SOURCES: list[Callable[[DatasetBuilder, Sequence[str], str], Source | None]] = []
# Make synthetic data, by the class of the builder: (builder, samples, 0 for train, 1 for validation and 2 for test).
# Filled by `megatron.plugins`.
MOCK_DATA: dict[type, Callable[[Any, int, int], Dataset]] = {}


def build_datasets(builder: DatasetBuilder, samples: tuple[int, int, int]) -> dict[str, Dataset]:
    """Build the datasets.

    Args:
        samples: minimum number of samples for training, validation and testing.

    Returns:
        The datasets by name: "train", "validation", "test". A dataset is absent if its number of samples is 0, or if
        the flags give it no data (a share of 0 in --split, or no path).

    Raises:
        InputError: a file is missing or damaged, a flag is wrong, or there are too few documents.
    """
    config = builder.config
    if config.mock_data:
        logger.info("data: synthetic (--mock-data)")
        counts = enumerate(zip(SPLITS.values(), samples, strict=True))
        make = MOCK_DATA[type(builder)]
        return {name: make(builder, count, i) for i, (name, count) in counts if count > 0}
    splits = _splits(builder)
    if "train" not in splits and samples[0] > 0:
        if config.data_path is not None:
            raise InputError(
                f"--split: {config.split} leaves no documents to train on; its first share must be above 0"
            )
        raise InputError("no data to train on: give --data-path, --train-data-path or --mock-data")
    datasets: dict[str, Dataset] = {}
    for (short, name), count in zip(SPLITS.items(), samples, strict=True):
        if count == 0:
            continue
        if short in splits:
            source, split = splits[short]
            datasets[name] = source.build(split, count)
        else:
            logger.debug(f"no {short} data: {_why_none(config, short)}; {short} loss will not be computed")
    return datasets


def _why_none(config: DataConfig, split: str) -> str:
    if config.data_path is None:
        return f"--{split}-data-path is not set"
    return f"--split {config.split or f'{DEFAULT_SPLIT} (the default)'} gives it no documents"


def _splits(builder: DatasetBuilder) -> dict[str, tuple[Source, Split]]:
    """The splits that get data by the flags."""
    config = builder.config
    splits: dict[str, tuple[Source, Split]] = {}
    if config.data_path is not None:
        source = _open(builder, config.data_path, "--data-path")
        text = config.split or DEFAULT_SPLIT
        shares, bounds_of = parse_split(text), DATA_ORDERS[config.data_order]

        def part(i: int, size: int) -> range:
            begin, end = bounds_of(shares, size)[i : i + 2]
            return range(begin, end)

        for i, name in enumerate(SPLITS):
            split = Split(name, f"--split {text}", functools.partial(part, i))
            # The default split may leave a small dataset nothing to test on; an explicit one may not.
            if shares[i] > 0 and (i == 0 or config.split is not None or source.has_documents(split)):
                splits[name] = source, split
        return splits
    for name in SPLITS:
        flag, words = f"--{name}-data-path", getattr(config, f"{name}_data_path")
        if words is not None:
            splits[name] = _open(builder, words, flag), Split(name, flag, range)
    return splits


def _open(builder: DatasetBuilder, words: Sequence[str], flag: str) -> Source:
    for open_source in SOURCES:
        if (source := open_source(builder, words, flag)) is not None:
            return source
    if len(words) != 1:
        raise InputError(f"{flag}: {len(words)} values; give one prefix")
    return TokenFile(builder, IndexedDataset(words[0]))
