"""Best-fit packing: GPT samples of whole documents, few of which are cut (arXiv 2404.10830).

A document that is longer than a sample is cut into pieces as long as a sample, of which only the last may be shorter.
Pieces are packed by best-fit-decreasing: each one, the longest first, goes into the sample with the least space that
holds it, or into a new sample. The space that is left in a sample is padding.

A sample has S + 1 tokens for S predictions (--seq-length). Pieces of a document overlap by one token, so each of its
tokens but the first is predicted once. No prediction crosses from a piece to another one, or into the padding.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import logging
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from megatron.data.gpt_dataset import GPTBatch, GPTDataset, ltor_batch
from megatron.data.index_cache import IndexRequest, MappedArrays, cached_arrays, check_memory
from megatron.errors import InputError

logger = logging.getLogger("megatron")

# Peak bytes while an index is built, for each piece and for each sample of the run.
PIECE_BYTES, SAMPLE_BYTES = 80, 16


@dataclasses.dataclass(kw_only=True)
class BestFitDataset(GPTDataset):
    """Samples of the pieces that the arrays of `build_index` in `index` define."""

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """Return sample `i`: {"text": int64 [at most seq_length + 1], "lengths": int64 [pieces]}.

        Raises:
            InputError: a token id is not in the vocabulary.
        """
        lengths = [length for _, _, length in self._spans(i)]
        return {**super().__getitem__(i), "lengths": np.array(lengths)}

    def _spans(self, i: int) -> Iterator[tuple[int, int, int]]:
        documents, offsets, starts, order = self.index
        first, stop = starts[order[i] :][:2].tolist()
        for sequence, offset in zip(
            documents[first:stop].tolist(), offsets[first:stop].tolist(), strict=True
        ):
            size = int(self.tokens.sizes[sequence])
            yield sequence, offset, min(size - offset, self.config.seq_length + 1)

    def collate(self, samples: Sequence[dict[str, np.ndarray]]) -> GPTBatch:
        """Make a batch of samples. The padding is a document too, which nothing attends to and nothing predicts."""
        shape = len(samples), self.config.seq_length + 1
        text = np.full(shape, 1 if self.eod == 0 else 0, dtype=np.int64)  # not the end of a document
        starts, predicts = np.zeros((2, *shape), dtype=bool)
        for row, sample in enumerate(samples):
            ends = sample["lengths"].cumsum()
            text[row, : ends[-1]] = sample["text"]
            predicts[row, : ends[-1]] = True
            predicts[row, ends - 1] = False
            starts[row, ends[ends < shape[1]]] = True
        batch = ltor_batch(text, self.eod, self.config, starts=starts[:, :-1])
        weights = torch.from_numpy(predicts[:, :-1].astype(np.float32))
        return dataclasses.replace(batch, loss_mask=batch.loss_mask * weights)


def cut_documents(
    sizes: np.ndarray, documents: range, seq_length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut documents into pieces of at most seq_length + 1 tokens. One of a single token predicts nothing and has none.

    Args:
        sizes: int32 [sequences], tokens in each sequence of the dataset.
        documents: range of sequences to use. (GPT treats every sequence as a document.)

    Returns:
        sequence, offset and length of each piece, int64 [pieces].
    """
    counts = np.maximum(-(-(sizes[documents.start : documents.stop].astype(np.int64) - 1) // seq_length), 0)
    sequences = np.repeat(np.arange(documents.start, documents.stop), counts)
    offsets = np.arange(len(sequences))
    offsets -= np.repeat(counts.cumsum() - counts, counts)
    offsets *= seq_length
    return sequences, offsets, np.minimum(sizes[sequences] - offsets, seq_length + 1)


def pack(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Pack pieces into bins by best-fit-decreasing.

    All bins with the same space are filled at once with pieces of the same length. This takes no loop over pieces, and
    as many steps as there are pairs of a length and a space that meet.

    Args:
        lengths: int64 [pieces], from 2 to `capacity`.
        capacity: of a bin.

    Returns:
        int64 [pieces], the bin of each piece.
    """
    by_length = np.argsort(-lengths, kind="stable")
    ends = np.flatnonzero(np.diff(lengths[by_length], append=0)) + 1
    bins = np.empty(len(lengths), dtype=np.int64)
    spaces: list[int] = []  # of bins that have some, increasing
    open_bins: dict[int, collections.deque[np.ndarray]] = {}  # by their space
    num_bins = 0

    def put_back(taken: np.ndarray, space: int) -> None:
        if space < 2 or len(taken) == 0:  # no piece is shorter
            return
        if space not in open_bins:
            bisect.insort(spaces, space)
        open_bins.setdefault(space, collections.deque()).append(taken)

    begin = 0
    for end in ends.tolist():
        pieces, begin = by_length[begin:end], end
        length = int(lengths[pieces[0]])
        while len(pieces):
            at = bisect.bisect_left(spaces, length)
            if at < len(spaces):
                space = spaces[at]
                each = space // length
                candidates = open_bins[space].popleft()
                if not open_bins[space]:
                    del open_bins[space], spaces[at]
                taken, rest = np.split(candidates, [-(-len(pieces) // each)])
                put_back(rest, space)
            else:
                space, each = capacity, capacity // length
                taken = np.arange(num_bins, num_bins + -(-len(pieces) // each))
                num_bins += len(taken)
            # A bin that takes one piece has the least space for the next one, until it is full.
            number = min(len(pieces), each * len(taken))
            bins[pieces[:number]] = np.repeat(taken, each)[:number]
            full, more = divmod(number, each)
            put_back(taken[:full], space - each * length)
            put_back(taken[full:], space - more * length)
            pieces = pieces[number:]
    return bins


def build_index(
    sizes: np.ndarray, documents: range, seq_length: int, samples: int, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Pack the documents, and order the samples at random, anew in each epoch.

    The order of an epoch does not depend on the number of samples, so a run can be extended.

    Args:
        samples: minimum number of samples; the index has whole epochs.
        seed: seed of numpy's RandomState.

    The other arguments are those of `cut_documents`.

    Returns:
        document index: int64 [pieces], sequence of each piece, sample by sample.
        offset index: int64 [pieces], first token of each piece in its sequence.
        start index: int64 [packed samples + 1], first piece of each sample.
        shuffle index: int64 [samples], samples in reading order.
    """
    cut = cut_documents(sizes, documents, seq_length)
    # Neighbors in the file are not in the same sample because they are equally long, nor the longest piece first.
    order = np.random.RandomState(seed).permutation(len(cut[0]))
    sequences, offsets, lengths = (part[order] for part in cut)
    del cut, order
    bins = pack(lengths, seq_length + 1)
    del lengths
    starts = np.concatenate(([0], np.bincount(bins).cumsum()))
    order = np.argsort(bins, kind="stable")
    packed = len(starts) - 1
    epochs = [np.random.RandomState([seed, 1 + i]).permutation(packed) for i in range(-(-samples // packed))]
    return sequences[order], offsets[order], starts, np.concatenate(epochs)


def report(sizes: np.ndarray, documents: range, seq_length: int, packed: int) -> str:
    """Describe the truncations and the padding of a packing in `packed` samples, and without it."""
    tokens = sizes[documents.start : documents.stop].astype(np.int64)
    _, _, lengths = cut_documents(sizes, documents, seq_length)
    ends = tokens.cumsum()
    cut = (ends - 1) // seq_length > (ends - tokens) // seq_length
    padding = [1 - lengths.sum() / (n * (seq_length + 1)) for n in (packed, len(lengths))]
    return (
        f"best-fit packing: {len(documents):,} documents of {tokens.sum():,} tokens in {packed:,} samples; documents "
        f"cut: {np.count_nonzero(tokens > seq_length + 1):,} (concatenated: {np.count_nonzero(cut):,}); padding: "
        f"{padding[0]:.2%} (one document per sample: {padding[1]:.2%})"
    )


def load_or_build(request: IndexRequest, seq_length: int) -> MappedArrays:
    """Load the index of `build_index` from the cache, or build and cache it. Reports the packing when it is built.

    Raises:
        InputError: no document has two tokens, the index would not fit in memory, or the cache is not writable.
    """
    prefix, sizes, documents = request.dataset.prefix, request.dataset.sizes, request.documents
    tokens = sizes[documents.start : documents.stop]
    if not (tokens > 1).any():
        raise InputError(f"--packing best-fit: no document of {prefix} has two tokens; use other data")
    pieces = len(documents) + int(tokens.sum(dtype=np.int64)) // seq_length
    check_memory(
        f"{prefix}: {pieces:,} pieces of documents and {request.samples:,} samples",
        needed=PIECE_BYTES * pieces + SAMPLE_BYTES * request.samples,
    )

    def build() -> Sequence[np.ndarray]:
        arrays = build_index(sizes, documents, seq_length, request.samples, request.seed)
        logger.info(
            "%s data %s: %s", request.split, prefix, report(sizes, documents, seq_length, len(arrays[2]) - 1)
        )
        return arrays

    return cached_arrays(
        *request.cache_entry("gpt best-fit", f"{seq_length}sl-best-fit", {"seq_length": seq_length}),
        ("document", "offset", "start", "shuffle"),
        build,
    )
