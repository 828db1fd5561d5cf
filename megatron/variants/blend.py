"""Blends: several datasets sampled in given proportions."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron.data.batch import Batch
from megatron.data.build import DatasetBuilder, Split, TokenFile
from megatron.data.dataset import Dataset
from megatron.data.index_cache import MappedArrays, cached_arrays
from megatron.data.indexed import IndexedDataset
from megatron.errors import InputError
from megatron.variants.blend_flags import parse_blend
from megatron.variants.blend_rounding import BlendRounding

logger = logging.getLogger("megatron")

# By --data-order. `megatron.plugins` adds to it.
ROUNDINGS = {"v2.5": BlendRounding()}


def open_blend(builder: DatasetBuilder, words: Sequence[str], flag: str) -> Blend | None:
    """Open the files of a blend; None if `words` is one prefix.

    Raises:
        InputError: as `parse_blend`, or a file is missing or damaged.
    """
    if len(words) == 1:
        return None
    prefixes, weights = parse_blend(words, flag)
    for prefix in sorted({prefix for prefix in prefixes if prefixes.count(prefix) > 1}):
        logger.info(
            f"note: {flag} names {prefix} more than once, which repeats its samples; add up its weights"
        )
    files = [TokenFile(builder, IndexedDataset(prefix)) for prefix in prefixes]
    # Megatron-LM ignores the weight of a single prefix, except in --data-path.
    return Blend(builder, files, weights if len(files) > 1 or flag == "--data-path" else None)


@dataclasses.dataclass(frozen=True)
class Blend:
    """Token files to sample from in given proportions.

    Attributes:
        weights: sampling weight of each file; None samples in proportion to their tokens.
    """

    builder: DatasetBuilder
    files: Sequence[TokenFile]
    weights: Sequence[float] | None

    def has_documents(self, split: Split) -> bool:
        return any(file.has_documents(split) for file in self.files)

    def build(self, split: Split, samples: int) -> Dataset:
        """Build the dataset of a split, from the files that have a share in it."""
        config = self.builder.config
        rounding = ROUNDINGS[config.data_order]
        tokens = [file.num_tokens(split) for file in self.files]
        fixed: list[int] | None = None
        if self.weights is not None:
            weights = list(self.weights)
        elif len(tokens) == 1:
            return self.files[0].build(split, samples)
        else:
            epochs = [max(0, count - 1) // config.seq_length for count in tokens]
            weights, fixed = rounding.unweighted(tokens, epochs)
        used = [i for i, weight in enumerate(weights) if weight > 0]
        files = [self.files[i] for i in used or [0]]
        for file in files:
            file.check_tokens(split, samples)
        if fixed is not None and sum(fixed) < samples:
            raise InputError(
                f"{split.source}: --data-order {config.data_order} reads a blend without weights once, which gives "
                f"{sum(fixed):,} samples, but '{split.name}' needs {samples:,}; give weights, or --data-order v2.5"
            )
        shares = rounding.normalize([weights[i] for i in used])
        if fixed is not None:
            counts = [fixed[i] for i in used]
        elif self.weights is None and len(used) == 1:
            counts = [samples]
        else:
            counts = [rounding.samples_of_share(samples, share) for share in shares]
        datasets = [file.build(split, count) for file, count in zip(files, counts, strict=True)]
        if len(datasets) == 1:
            return datasets[0]
        order = load_or_build_order(shares, samples, split=split.name, cache=files[0].cache)
        return BlendedDataset(datasets, order)


def blend_order(weights: Sequence[float], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the dataset of each sample of a blend, in Megatron-LM's order.

    Sample i comes from the dataset d that lags furthest behind its share, by weights[d] * max(i, 1) - count[d]; the
    first one wins a tie. That dataset provides its next sample.

    Each choice depends on all earlier ones. But the counts never stray far from the shares, and two runs with
    different counts soon converge. So about sqrt(size) chunks of samples advance in parallel from guessed counts. The
    chunks whose guess was not the end of the chunk before run again, until every chunk starts correctly.

    Returns:
        dataset_index: int16 [size].
        sample_index: int64 [size], number of earlier samples from the same dataset.
    """
    shares = np.asarray(weights, dtype=np.float64) / np.sum(weights)
    steps = math.isqrt(size) + 1
    firsts = np.arange(-(-size // steps)) * steps  # the first sample of each chunk
    dataset_index = np.empty((len(firsts), steps), dtype=np.int16)
    sample_index = np.empty((len(firsts), steps), dtype=np.int64)
    starts = _nearest_counts(shares, firsts)
    ends = np.empty_like(starts)
    chunks = np.arange(len(firsts))
    while len(chunks):
        counts, rows = starts[chunks], np.arange(len(chunks))
        for step in range(steps):
            samples = np.maximum(firsts[chunks] + step, 1.0)
            chosen = np.argmax(shares * samples[:, None] - counts, axis=1)
            dataset_index[chunks, step] = chosen
            sample_index[chunks, step] = counts[rows, chosen]
            counts[rows, chosen] += 1
        ends[chunks] = counts
        chunks = 1 + np.flatnonzero((starts[1:] != ends[:-1]).any(axis=1))
        starts[chunks] = ends[chunks - 1]
    return dataset_index.reshape(-1)[:size], sample_index.reshape(-1)[:size]


def _nearest_counts(shares: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """Round `totals` x `shares` to integers with these totals: float64 [len(totals), len(shares)]."""
    exact = totals[:, None] * shares
    counts = np.floor(exact)
    by_remainder = np.argsort(np.argsort(counts - exact, axis=1, kind="stable"), axis=1)
    missing = totals - counts.sum(axis=1)
    return counts + (by_remainder < missing[:, None])


@dataclasses.dataclass
class BlendedDataset:
    """Samples of several datasets of one kind, in the order of `blend_order`."""

    datasets: Sequence[Dataset]
    index: MappedArrays

    def __len__(self) -> int:
        dataset_index, _ = self.index
        return len(dataset_index)

    def __getitem__(self, i: int) -> Any:
        dataset_index, sample_index = self.index
        return self.datasets[dataset_index[i]][int(sample_index[i])]

    def collate(self, samples: Sequence[Any]) -> Batch:
        """Make a batch of samples, as any of the datasets does."""
        return self.datasets[0].collate(samples)


def load_or_build_order(weights: Sequence[float], size: int, *, split: str, cache: str) -> MappedArrays:
    """Load `blend_order(weights, size)` from the cache directory, or build and cache it."""
    return cached_arrays(
        cache,
        f"blend-{split}-{size}ns-{len(weights)}",
        {"kind": "blend", "weights": list(weights), "size": size},
        ("dataset", "sample"),
        lambda: blend_order(weights, size),
    )
