"""Megatron-LM's document, sample and shuffle indices, which define the tokens of each GPT sample.

The documents of a split are concatenated in random order, repeated for as many epochs as the samples need. This
stream is cut every `seq_length` tokens. A sample has seq_length + 1 tokens; its last one is also the first of the next
sample. The samples are read in random order. For the same seed the three arrays equal Megatron-LM's (both draw from
numpy's RandomState), but they are built here without a loop over samples.
"""

from __future__ import annotations

import dataclasses
import logging

import numpy as np

from megatron.data.index_cache import IndexRequest, MappedArrays, cached_arrays, check_memory
from megatron.data.indexed import chunks

logger = logging.getLogger("megatron")

INT32_MAX = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class EpochPlan:
    """Epochs needed for a number of samples.

    Attributes:
        epochs: passes over the documents.
        samples: samples in all epochs; at least the number needed.
        first_samples: number of samples shuffled together first. If less than 80% of the last epoch is needed, its
            documents would be sampled unevenly. The last epoch is then shuffled separately, and this is the number of
            samples in the epochs before it; otherwise it is the number of all samples.
    """

    epochs: int
    samples: int
    first_samples: int

    @property
    def separate_last_epoch(self) -> bool:
        return self.first_samples < self.samples


def plan_epochs(tokens_per_epoch: int, seq_length: int, samples: int) -> EpochPlan:
    """Plan the epochs for at least `samples` samples of seq_length + 1 tokens, each overlapping the next by one."""
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
        sizes: int32 [sequences], tokens in each sequence of the dataset.
        documents: range of sequences to use. (GPT treats every sequence as a document.)
        seq_length: tokens from the start of one sample to the start of the next.
        plan: result of `plan_epochs`.
        seed: seed of numpy's RandomState.

    Returns:
        document index: int32 [epochs * documents], sequences in the order of the stream.
        sample index: int32 [samples + 1, 2], start of each sample: a position in the document index and an offset
            into that document. Sample i ends with the token at which sample i + 1 starts.
        shuffle index: uint32 [samples], samples in reading order.
        An array is int64 if its values do not fit the narrower type.
    """
    rng = np.random.RandomState(seed)
    document_index = _document_index(documents, plan, rng)
    sample_index = _sample_index(sizes, document_index, seq_length, plan.samples)
    return document_index, sample_index, _shuffle_index(plan, rng)


def _document_index(documents: range, plan: EpochPlan, rng: np.random.RandomState) -> np.ndarray:
    # Shuffled as int64, for which numpy is faster, and narrowed afterward.
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
    # Row 0 stays (0, 0) even if the first document is empty, as in Megatron-LM.
    first = 0
    for part in chunks(samples):
        token = np.arange(part.start + 1, part.stop + 1, dtype=np.int64) * seq_length
        # Search only the documents that this chunk can reach.
        last = int(np.searchsorted(ends, token[-1], side="right"))
        position = first + np.searchsorted(ends[first : last + 1], token, side="right")
        index[1:, 0][part] = position
        index[1:, 1][part] = token - (ends[position] - sizes[document_index[position]])
        first = int(position[-1])
    return index


def _ends(sizes: np.ndarray, document_index: np.ndarray) -> np.ndarray:
    """Return each document's end in the stream, int64 [documents]. Chunks more than halve the time."""
    ends = np.empty(len(document_index), dtype=np.int64)
    total = 0
    for part in chunks(len(ends)):
        np.cumsum(sizes[document_index[part]], out=ends[part])
        ends[part] += total
        total = ends[part.stop - 1]
    return ends


def _shuffle_index(plan: EpochPlan, rng: np.random.RandomState) -> np.ndarray:
    dtype = np.uint32 if plan.samples < 2**32 - 2 else np.int64
    index = np.arange(plan.samples, dtype=np.int64)
    rng.shuffle(index[: plan.first_samples])
    if plan.separate_last_epoch:
        rng.shuffle(index[plan.first_samples :])
    return index.astype(dtype)


def load_or_build(request: IndexRequest, seq_length: int) -> MappedArrays:
    """Load the document, sample and shuffle index (`build_indices`) from the cache, or build and cache them.

    The documents must hold at least one token.

    Raises:
        InputError: the index would not fit in memory, or the cache is not writable.
    """
    dataset, documents = request.dataset, request.documents
    tokens = int(dataset.sizes[documents.start : documents.stop].sum(dtype=np.int64))
    plan = plan_epochs(tokens, seq_length, request.samples)
    check_memory(
        f"{dataset.prefix}: {plan.samples:,} samples ({plan.epochs:,} epochs)",
        needed=16 * plan.epochs * len(documents) + 24 * plan.samples,
    )
    _log_size(request, tokens, seq_length, plan)

    return cached_arrays(
        *request.cache_entry("gpt", f"{seq_length}sl", {"seq_length": seq_length}),
        ("document", "sample", "shuffle"),
        lambda: build_indices(dataset.sizes, documents, seq_length, plan, request.seed),
    )


def _log_size(request: IndexRequest, tokens: int, seq_length: int, plan: EpochPlan) -> None:
    line = (
        f"{request.split} data {request.dataset.prefix}: {len(request.documents):,} documents, {tokens:,} tokens, "
        f"{(tokens - 1) // seq_length:,} samples of {seq_length:,} tokens; needed: {request.samples:,} samples"
    )
    if plan.epochs > 1:
        line += f", {plan.epochs:,} epochs"
    if plan.separate_last_epoch:
        line += ", the last one shuffled separately"
    logger.debug(line)
