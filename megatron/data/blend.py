"""Several data sets drawn from in given proportions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron.data.index_cache import MappedArrays, cached_arrays, spread
from megatron.flags import InputError

MAX_DATASETS = np.iinfo(np.int16).max


def parse_blend(values: Sequence[str], flag: str) -> tuple[list[str], list[float] | None]:
    """The prefixes that a data flag names, and their weights.

    Args:
        values: 'weight prefix' pairs; or one or several prefixes, which then have no weights (None) and are to be
            drawn from by their sizes.
        flag: its name, for messages.

    Raises:
        InputError: no value, a weight without a prefix or the reverse, or a weight that is no positive number.
    """
    if not values:
        raise InputError(f"{flag} names no data: a prefix, or 'weight prefix weight prefix ...' is wanted")
    if len(values) > 2 * MAX_DATASETS:
        raise InputError(f"{flag}: {len(values)} values; a blend is of {MAX_DATASETS} data sets at most")
    if len(values) == 1:
        return list(values), None
    weights = [_number(value) for value in values[::2]]
    if all(weight is None for weight in weights):
        return list(values), None
    if len(values) % 2:
        raise InputError(
            f"{flag}: {len(values)} values; weights and prefixes come in pairs, 'weight prefix weight prefix ...'"
        )
    for weight, value, prefix in zip(weights, values[::2], values[1::2], strict=True):
        if weight is None:
            raise InputError(
                f"{flag}: {value!r} stands where the weight of {prefix} should; it is not a number"
            )
        if not 0 < weight < math.inf:
            raise InputError(
                f"{flag}: the weight of {prefix} is {value}; it must be greater than 0 and finite"
            )
    return list(values[1::2]), weights


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def blend_order(weights: Sequence[float], size: int) -> tuple[np.ndarray, np.ndarray]:
    """From which data set each sample of a blend is taken, in Megatron-LM's order.

    Sample i goes to the data set d that lags furthest behind its share, by weights[d] * max(i, 1) - count[d],
    the first one where several do; which takes its next sample.

    One such choice depends on all before it, yet the counts never stray far from the shares, and two courses of
    counts soon meet. So the samples are cut in about sqrt(size) chunks that advance side by side from guessed
    counts; then those that did not start where their predecessor ended run again, until all have.

    Returns:
        dataset_index: int16 [size].
        sample_index: int64 [size], how many samples before this one are from the same data set.
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
            picked = np.argmax(shares * samples[:, None] - counts, axis=1)
            dataset_index[chunks, step] = picked
            sample_index[chunks, step] = counts[rows, picked]
            counts[rows, picked] += 1
        ends[chunks] = counts
        chunks = 1 + np.flatnonzero((starts[1:] != ends[:-1]).any(axis=1))
        starts[chunks] = ends[chunks - 1]
    return dataset_index.reshape(-1)[:size], sample_index.reshape(-1)[:size]


def _nearest_counts(shares: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """float64 [len(totals), len(shares)] of whole numbers that sum to each total, nearest to the shares of it."""
    exact = totals[:, None] * shares
    counts = np.floor(exact)
    by_remainder = np.argsort(np.argsort(counts - exact, axis=1, kind="stable"), axis=1)
    missing = totals - counts.sum(axis=1)
    return counts + (by_remainder < missing[:, None])


class BlendedDataset:
    """Samples of several data sets, of one kind, in the order of `blend_order`."""

    def __init__(self, datasets: Sequence[Any], index: MappedArrays) -> None:
        self.datasets = datasets
        self.index = index
        self._dataset_index, self._sample_index = index
        self.stack, self.fields = datasets[0].stack, datasets[0].fields

    def __len__(self) -> int:
        return len(self._dataset_index)

    def __reduce__(self) -> tuple[type[BlendedDataset], tuple[Sequence[Any], MappedArrays]]:
        return BlendedDataset, (self.datasets, self.index)

    def __getitem__(self, i: int) -> Any:
        return self.datasets[self._dataset_index[i]][int(self._sample_index[i])]


def load_or_build_order(weights: Sequence[float], size: int, *, name: str, cache: str) -> MappedArrays:
    """`blend_order` of these arguments, from the cache where it is in it; `name` says what for."""

    def check(arrays: Sequence[np.ndarray]) -> bool:
        datasets, samples = map(spread, arrays)
        whole = all(array.shape == (size,) and array.dtype.kind == "i" for array in arrays)
        return bool(
            whole
            and datasets.min() >= 0
            and datasets.max() < len(weights)
            and samples.min() >= 0
            and samples.max() < size
        )

    return cached_arrays(
        cache,
        f"blend-{name}-{size}ns-{len(weights)}",
        {"kind": "blend", "weights": list(weights), "size": size},
        ("dataset", "sample"),
        lambda: blend_order(weights, size),
        check,
    )
