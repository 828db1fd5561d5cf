"""Which tokens make up a GPT sample: the document, sample and shuffle indices of Megatron-LM.

The documents of a split are laid out in random order, as many times over as samples are wanted ("epochs"), and
this stream is cut every `seq_length` tokens; a sample is seq_length + 1 tokens and shares its last one with the
next. The samples are then read in random order. For equal seeds the three arrays equal Megatron-LM's (the
random numbers are those of numpy's RandomState), though they are made here without a loop over samples.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Sequence

import numpy as np

from megatron.data.index_cache import MappedArrays, cached_arrays, check_memory, file_fingerprint, spread
from megatron.data.indexed import IndexedDataset
from megatron.flags import InputError

logger = logging.getLogger("megatron")

INT32_MAX = 2**31 - 1
CHUNK = 1 << 20  # documents or samples worked on at once, few enough for the processor's caches


@dataclasses.dataclass(frozen=True)
class EpochPlan:
    """How many passes over the documents give the samples wanted.

    Attributes:
        epochs: passes over the documents.
        samples: samples in all of them; at least as many as are wanted.
        first_samples: those shuffled among themselves before the rest: samples of all epochs but the last if
            so little of that is wanted that, mixed in, it would be drawn from unevenly; else all.
    """

    epochs: int
    samples: int
    first_samples: int

    @property
    def separate_last_epoch(self) -> bool:
        return self.first_samples < self.samples


def plan_epochs(tokens_per_epoch: int, seq_length: int, samples: int) -> EpochPlan:
    """Plan for at least `samples` samples of seq_length + 1 tokens, each overlapping the next by one."""
    epochs = -(-(samples * seq_length + 1) // tokens_per_epoch)
    available = (epochs * tokens_per_epoch - 1) // seq_length
    if epochs == 1:
        return EpochPlan(epochs, available, available)
    before_last = ((epochs - 1) * tokens_per_epoch - 1) // seq_length
    per_epoch = (tokens_per_epoch - 1) // seq_length
    separate = samples - before_last < int(0.80 * per_epoch)
    return EpochPlan(epochs, available, before_last if separate else available)


def build_indices(
    sizes: np.ndarray, documents: range, seq_length: int, plan: EpochPlan, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Build the three indices.

    Args:
        sizes: int32 [sequences], tokens in each sequence of the data set.
        documents: which of these sequences to take. (GPT takes every sequence for a document.)
        seq_length: tokens from the start of one sample to that of the next.
        plan: from `plan_epochs`.
        seed: of numpy's RandomState.

    Returns:
        document index: int32 [epochs * documents], sequences in the order of the stream.
        sample index: int32 [samples + 1, 2], where each sample starts: a position in the document index and an
            offset into that document. Sample i ends with the token at which sample i + 1 starts.
        shuffle index: uint32 [samples], the samples in reading order.
        Each is int64 instead where the narrower type does not hold its values.
    """
    rng = np.random.RandomState(seed)
    document_index = _document_index(documents, plan, rng)
    sample_index = _sample_index(sizes, document_index, seq_length, plan.samples)
    return document_index, sample_index, _shuffle_index(plan, rng)


def _document_index(documents: range, plan: EpochPlan, rng: np.random.RandomState) -> np.ndarray:
    # Shuffled as int64, for which numpy has a faster loop, and narrowed afterwards.
    dtype = np.int32 if documents.stop <= INT32_MAX else np.int64
    epochs = [plan.epochs - 1, 1] if plan.separate_last_epoch else [plan.epochs]
    parts = []
    for count in epochs:
        part = np.tile(np.arange(documents.start, documents.stop, dtype=np.int64), count)
        rng.shuffle(part)
        parts.append(part.astype(dtype))
        del part
    return np.concatenate(parts) if len(parts) > 1 else parts[0]


def _sample_index(sizes: np.ndarray, document_index: np.ndarray, seq_length: int, samples: int) -> np.ndarray:
    """Locate token i * seq_length of the stream, for each sample i, by binary search among document ends."""
    ends = _ends(sizes, document_index)
    dtype = np.int32 if len(document_index) <= INT32_MAX else np.int64
    index = np.zeros((samples + 1, 2), dtype=dtype)
    # Row 0 stays (0, 0), also where the first document is empty: Megatron-LM starts there in any case.
    first = 0
    for start in range(1, samples + 1, CHUNK):
        stop = min(start + CHUNK, samples + 1)
        token = np.arange(start, stop, dtype=np.int64) * seq_length
        # Only where this chunk can lie.
        last = int(np.searchsorted(ends, token[-1], side="right"))
        position = first + np.searchsorted(ends[first : last + 1], token, side="right")
        document_start = ends[position] - sizes[document_index[position]]
        index[start:stop, 0] = position
        index[start:stop, 1] = token - document_start
        first = int(position[-1])
    return index


def _ends(sizes: np.ndarray, document_index: np.ndarray) -> np.ndarray:
    """int64 [documents]: where in the stream each document ends. By chunks, at less than half the time."""
    ends = np.empty(len(document_index), dtype=np.int64)
    total = 0
    for start in range(0, len(ends), CHUNK):
        part = ends[start : start + CHUNK]
        np.cumsum(sizes[document_index[start : start + CHUNK]], out=part)
        part += total
        total = part[-1]
    return ends


def _shuffle_index(plan: EpochPlan, rng: np.random.RandomState) -> np.ndarray:
    dtype = np.uint32 if plan.samples < 2**32 - 2 else np.int64
    index = np.arange(plan.samples, dtype=np.int64)
    rng.shuffle(index[: plan.first_samples])
    if plan.separate_last_epoch:
        rng.shuffle(index[plan.first_samples :])
    return index.astype(dtype)


def load_or_build(
    dataset: IndexedDataset,
    documents: range,
    *,
    name: str,
    seq_length: int,
    samples: int,
    seed: int,
    cache: str,
) -> MappedArrays:
    """The document, sample and shuffle index (`build_indices`), from the cache where they are in it.

    Args:
        documents: which sequences of `dataset` to take.
        name: what these are for ('train', 'valid' or 'test').
        samples: how many are wanted at least.
        cache: folder of the cache.

    Raises:
        InputError: there is not a single token in `documents`, the index would not fit in memory, or the cache
            cannot be written.
    """
    tokens = int(dataset.sizes[documents.start : documents.stop].sum(dtype=np.int64))
    if tokens == 0:
        raise InputError(
            f"{dataset.prefix}: the {len(documents)} documents for {name} hold no tokens, "
            f"but {samples} samples are wanted"
        )
    plan = plan_epochs(tokens, seq_length, samples)
    check_memory(
        f"{dataset.prefix}: {plan.samples:,} samples, {plan.epochs:,} epochs of this data,",
        needed=16 * plan.epochs * len(documents) + 24 * plan.samples,
    )
    _report(f"{name} data {dataset.prefix}", len(documents), tokens, seq_length, samples, plan)

    def check(arrays: Sequence[np.ndarray]) -> bool:
        document, sample, shuffle = arrays
        return (
            document.shape == (plan.epochs * len(documents),)
            and sample.shape == (plan.samples + 1, 2)
            and shuffle.shape == (plan.samples,)
            and all(array.dtype.kind in "iu" for array in arrays)
            and _within(document, documents.start, documents.stop)
            and _within(sample[:, 0], 0, len(document))
            and bool((np.diff(spread(sample[:, 0]).astype(np.int64)) >= 0).all())
            and bool((spread(sample[:, 1]) <= dataset.sizes[document[spread(sample[:, 0])]]).all())
            and _within(shuffle, 0, plan.samples)
        )

    return cached_arrays(
        cache,
        f"{os.path.basename(dataset.prefix)[:100]}-{name}-{samples}ns-{seq_length}sl-{seed}s",
        {
            "kind": "gpt",
            "data": file_fingerprint(dataset.idx_path),
            "documents": [documents.start, documents.stop],
            "samples": samples,
            "seq_length": seq_length,
            "seed": seed,
        },
        ("document", "sample", "shuffle"),
        lambda: build_indices(dataset.sizes, documents, seq_length, plan, seed),
        check,
    )


def _report(data: str, documents: int, tokens: int, seq_length: int, samples: int, plan: EpochPlan) -> None:
    line = (
        f"{data}: {documents:,} documents of {tokens:,} tokens; {samples:,} samples of {seq_length:,} tokens wanted, "
        f"the data has {(tokens - 1) // seq_length:,}"
    )
    if plan.epochs > 1:
        line += f", so it is read {plan.epochs:,} times"
    if plan.separate_last_epoch:
        line += ", the last of them shuffled by itself"
    logger.info(line)


def _within(values: np.ndarray, start: int, stop: int) -> bool:
    some = spread(values)
    return bool(start <= some.min() and some.max() < stop)
