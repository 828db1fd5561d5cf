"""Build the training, validation and test datasets that the data flags describe, for any kind of sample."""

from __future__ import annotations

import dataclasses
import logging
import os
from typing import Protocol

from megatron.data.blend import BlendedDataset, load_or_build_order, parse_blend
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

    def build_mock(self, samples: int, split: int) -> Dataset:
        """Build a synthetic dataset; `split` is 0 for train, 1 for validation and 2 for test."""


@dataclasses.dataclass(frozen=True)
class Split:
    """Data of one split.

    Attributes:
        name: "train", "valid" or "test".
        source: flag that selected the documents, for messages.
        files: token files to sample from.
        documents: range of documents to use in each file.
        weights: sampling weight of each file; None samples in proportion to their tokens.
    """

    name: str
    source: str
    files: list[IndexedDataset]
    documents: list[range]
    weights: list[float] | None


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
        return {name: builder.build_mock(count, i) for i, (name, count) in counts if count > 0}
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
            datasets[name] = _build(splits[short], builder, count)
        else:
            logger.debug(f"no {short} data: {_why_none(config, short)}; {short} loss will not be computed")
    return datasets


def _why_none(config: DataConfig, split: str) -> str:
    if config.data_path is None:
        return f"--{split}-data-path is not set"
    return f"--split {config.split or f'{DEFAULT_SPLIT} (the default)'} gives it no documents"


def _splits(builder: DatasetBuilder) -> dict[str, Split]:
    """Divide the files that the flags name among the splits."""
    config = builder.config
    splits = {}
    if config.data_path is not None:
        prefixes, weights = parse_blend(config.data_path, "--data-path")
        files = [IndexedDataset(prefix) for prefix in prefixes]
        text = config.split or DEFAULT_SPLIT
        shares = parse_split(text)
        order = DATA_ORDERS[config.data_order]
        bounds = [order.split_bounds(shares, builder.num_documents(file)) for file in files]
        for i, name in enumerate(SPLITS):
            documents = [range(b[i], b[i + 1]) for b in bounds]
            # The default split may leave a small dataset nothing to test on; an explicit one may not.
            if shares[i] > 0 and (i == 0 or config.split is not None or any(documents)):
                splits[name] = Split(name, f"--split {text}", files, documents, weights)
        return splits
    for name in SPLITS:
        flag, values = f"--{name}-data-path", getattr(config, f"{name}_data_path")
        if values is None:
            continue
        prefixes, weights = parse_blend(values, flag)
        files = [IndexedDataset(prefix) for prefix in prefixes]
        documents = [range(builder.num_documents(file)) for file in files]
        # Megatron-LM ignores the weight of a single prefix here, but not in --data-path.
        splits[name] = Split(name, flag, files, documents, weights if len(prefixes) > 1 else None)
    return splits


def _build(split: Split, builder: DatasetBuilder, samples: int) -> Dataset:
    """Build the dataset of one split, a blend if it has several files."""
    config = builder.config
    order = DATA_ORDERS[config.data_order]
    tokens = [
        builder.num_tokens(file, documents)
        for file, documents in zip(split.files, split.documents, strict=True)
    ]
    weights: list[float] = [*tokens] if split.weights is None else split.weights
    fixed: list[int] | None = None
    if split.weights is None and len(tokens) > 1:
        epochs = [max(0, count - 1) // config.seq_length for count in tokens]
        weights, fixed = order.unweighted_blend(tokens, epochs)
    used = [i for i, weight in enumerate(weights) if weight > 0]
    for i in used or [0]:
        if tokens[i] == 0:
            raise InputError(
                f"{split.source}: '{split.name}' gets {len(split.documents[i]):,} of the "
                f"{builder.num_documents(split.files[i]):,} documents of {split.files[i].prefix}, with 0 tokens, but "
                f"needs {samples:,} samples; give it more documents, or none (a share of 0, or no path)"
            )
    if fixed is not None and sum(fixed) < samples:
        raise InputError(
            f"{split.source}: --data-order {config.data_order} reads a blend without weights once, which gives "
            f"{sum(fixed):,} samples, but '{split.name}' needs {samples:,}; give weights, or --data-order v2.5"
        )
    shares = order.normalize([weights[i] for i in used])
    if fixed is not None:
        counts = [fixed[i] for i in used]
    elif split.weights is None and len(used) == 1:
        counts = [samples]
    else:
        counts = [order.samples_of_share(samples, share) for share in shares]
    if split.name == "train":
        # Of BERT's samples, which may be shorter than a sequence, the number of epochs is a bound.
        passes = [count * config.seq_length / tokens[i] for i, count in zip(used, counts, strict=True)]
        low, high = (f"{end(passes):.3g}" for end in (min, max))
        logger.info(
            f"data: {split.files[used[0]].prefix}{f' and {len(used) - 1} more' if len(used) > 1 else ''}, "
            f"{sum(tokens[i] for i in used):,} tokens to train on; the run's {samples:,} samples are "
            f"{low if low == high else f'{low} to {high}'} epochs"
        )
    caches = [
        config.data_cache_path or os.path.join(os.path.dirname(split.files[i].prefix), "index-cache")
        for i in used
    ]
    datasets = [
        builder.build(
            IndexRequest(
                dataset=split.files[i],
                documents=split.documents[i],
                split=split.name,
                samples=count,
                seed=builder.seed,
                cache=cache,
            )
        )
        for i, count, cache in zip(used, counts, caches, strict=True)
    ]
    if len(datasets) == 1:
        return datasets[0]
    return BlendedDataset(datasets, load_or_build_order(shares, samples, split=split.name, cache=caches[0]))
