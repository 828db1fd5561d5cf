"""Megatron-LM's sentence map, which defines the sentences of each BERT sample.

Each document is cut, sentence by sentence, into samples of a target length. Most targets are the longest that fits the
sequence; a random fraction (--short-seq-prob) is shorter. The documents are repeated for as many epochs as the samples
need. Then the samples are shuffled. For the same seed the map equals Megatron-LM's.

Megatron-LM draws one random number per target in order, so where the draws of a document begin depends on how all
earlier documents were cut. But only a short target cuts a document differently from a full one. So all documents are
first cut in parallel with full targets, and the few that meet a short one are cut again one by one. This determines
the draws of each document, and all documents are cut in parallel with their own targets.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator

import numpy as np

from megatron.data.index_cache import IndexRequest, MappedArrays, cached_arrays, check_memory
from megatron.data.indexed import IndexedDataset
from megatron.data.mersenne_twister import MersenneTwister64
from megatron.errors import InputError

logger = logging.getLogger("megatron")

LONG_SENTENCE = 512  # tokens; a document of several sentences is skipped if one of them is longer
SPECIAL_TOKENS = 3  # [CLS] A [SEP] B [SEP]
CHUNK = 1 << 18  # documents or samples processed at once


@dataclasses.dataclass(frozen=True)
class CutRules:
    """Rules that cut documents into samples.

    Attributes:
        longest: full target length, in tokens.
        short_every: one of this many targets is short, 2 to `longest` tokens; 0 for none.
        min_sentences: minimum number of sentences in a sample.
    """

    longest: int
    short_every: int
    min_sentences: int

    @classmethod
    def of(cls, *, seq_length: int, short_seq_prob: float, binary_head: bool) -> CutRules:
        """Derive the rules from the flags. The binary head needs at least two sentences."""
        every = math.floor(min(1 / short_seq_prob, 2**32) + 0.5) if short_seq_prob > 0 else 0
        return cls(seq_length - SPECIAL_TOKENS, every, 2 if binary_head else 1)


class Targets:
    """Stream of target lengths, in the order of the draws.

    As in Megatron-LM one random word decides both if a target is short and how short. So only every d-th short length
    occurs, where d is the greatest common divisor of `short_every` and `longest` - 1.
    """

    def __init__(self, rules: CutRules, seed: int) -> None:
        self._rules = rules
        self._rng = np.random.RandomState(seed)  # its 32-bit words are those of std::mt19937
        self._ahead = np.empty(0, dtype=np.int64)

    def peek(self, count: int) -> np.ndarray:
        """Return the next targets, int64 [at least count]."""
        if count > len(self._ahead):
            self._ahead = np.concatenate([self._ahead, self._draw(count - len(self._ahead))])
        return self._ahead

    def skip(self, count: int) -> None:
        """Consume the next `count` targets, which `peek` has returned."""
        self._ahead = self._ahead[count:].copy()

    def _draw(self, count: int) -> np.ndarray:
        longest, every = self._rules.longest, self._rules.short_every
        targets = np.full(count, longest, dtype=np.int64)
        if every:
            words = self._rng.randint(0, 2**32, size=count, dtype=np.uint32)
            short = np.flatnonzero(words % every == 0) if every < 2**32 else np.flatnonzero(words == 0)
            targets[short] = 2 + words[short] % (longest - 1)
        return targets


def build_map(
    sizes: np.ndarray, bounds: np.ndarray, usable: np.ndarray, rules: CutRules, *, samples: int, seed: int
) -> np.ndarray:
    """Build the sentence map.

    Args:
        sizes: int32 [sentences], tokens in each sentence.
        bounds: int64 [documents + 1], first sentence of each document, then the end of the last document.
        usable: bool [documents], documents to use, at least one; from `usable_documents`.
        samples: minimum number of samples. The last epoch is kept whole.
        seed: seed of the target lengths; `seed` + 1 shuffles the samples.

    Returns:
        uint32 [samples, 3] (uint64 if the sentence numbers need it). Each row has a sample's first sentence, the end
        of its sentences (exclusive), and the target length to truncate it to.
    """
    dtype = np.uint32 if len(sizes) < 2**32 else np.uint64
    targets = Targets(rules, seed)
    parts, built = [], 0
    while built < samples:
        for at in range(0, len(usable), CHUNK):
            documents = at + np.flatnonzero(usable[at : at + CHUNK])
            if len(documents):
                part = _cut(sizes, bounds[documents], bounds[documents + 1], rules, targets)
                parts.append(part.astype(dtype))
                built += len(part)
    rows = np.concatenate(parts)
    del parts
    return rows[_permutation(len(rows), seed + 1)]


def usable_documents(
    sizes: np.ndarray, bounds: np.ndarray, min_sentences: int
) -> tuple[np.ndarray, np.ndarray]:
    """Find the documents with enough sentences, and those not skipped for a long sentence; bool [documents] each."""
    sentences = np.diff(bounds)
    long = bounds[0] + np.flatnonzero(sizes[bounds[0] : bounds[-1]] > LONG_SENTENCE)
    has_long = np.zeros(len(sentences), dtype=bool)
    has_long[np.searchsorted(bounds, long, side="right") - 1] = True
    return sentences >= min_sentences, ~has_long | (sentences == 1)


def _cut(
    sizes: np.ndarray, first: np.ndarray, stop: np.ndarray, rules: CutRules, targets: Targets
) -> np.ndarray:
    """Cut documents into samples, int64 [samples, 3], consuming their targets.

    Args:
        first, stop: int64 [documents], range of sentences of each document.
    """
    origin = first[0]
    first, stop = first - origin, stop - origin
    ends = np.zeros(stop[-1] + 1, dtype=np.int64)  # tokens before each sentence, and after the last
    np.cumsum(sizes[origin : origin + stop[-1]], out=ends[1:])
    # An upper bound. Each document also draws a target after its last sample, which stays unused.
    draws = int(((stop - first) // rules.min_sentences + 1).sum())
    ahead = targets.peek(draws)
    samples = _count_samples(ends, first, stop, rules, ahead)
    last_draw = np.cumsum(samples + 1) - 1
    targets.skip(int(last_draw[-1]) + 1)

    first_draw = last_draw - samples
    first_row = first_draw - np.arange(len(first))
    rows = np.empty((int(samples.sum()), 3), dtype=np.int64)
    cut = _cut_in_parallel(ends, first, stop, rules, lambda documents, i: ahead[first_draw[documents] + i])
    for i, (documents, start, end, target) in enumerate(cut):
        at = first_row[documents] + i
        rows[at, 0] = origin + start
        rows[at, 1] = origin + end
        rows[at, 2] = target
    return rows


def _cut_in_parallel(
    ends: np.ndarray,
    first: np.ndarray,
    stop: np.ndarray,
    rules: CutRules,
    target_of: Callable[[np.ndarray, int], np.ndarray | int],
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | int]]:
    """Cut the first sample of every document, then the second of every document with sentences left, and so on.

    Yields:
        The documents, and for each document the first sentence, the end and the target of its i-th sample. The target
        is `target_of(documents, i)`.
    """
    documents, start = np.arange(len(first)), first
    i = 0
    while len(documents):
        target = target_of(documents, i)
        end = np.searchsorted(ends, ends[start] + target)
        np.maximum(end, start + rules.min_sentences, out=end)
        # The sample takes all the rest if a single sentence would be left over.
        last = stop[documents]
        end = np.where(last - end > 1, end, last)
        yield documents, start, end, target
        more = end < last
        documents, start = documents[more], end[more]
        i += 1


def _count_samples(
    ends: np.ndarray, first: np.ndarray, stop: np.ndarray, rules: CutRules, targets: np.ndarray
) -> np.ndarray:
    """Count the samples of each document, int64 [documents], whose targets start at the first of `targets`."""
    usual = np.zeros(len(first), dtype=np.int64)  # samples with full targets only
    for documents, *_ in _cut_in_parallel(ends, first, stop, rules, lambda *_: rules.longest):
        usual[documents] += 1
    unused = np.cumsum(usual + 1) - 1  # the draw after a document's last sample
    owner = np.repeat(np.arange(len(first)), usual + 1)
    samples = usual.copy()

    # The loop needs plain integers, which a memoryview yields several times faster than an array.
    ends_view, first_view, stop_view, targets_view = map(_view, (ends, first, stop, targets))
    owner_of, unused_of, usual_of, samples_of = map(_view, (owner, unused, usual, samples))
    shift = 0  # draws so far in excess of the usual ones
    walked = 0  # draws of documents that are done
    for draw in np.flatnonzero(targets < rules.longest).tolist():
        if draw < walked:
            continue
        if draw - shift >= len(owner):
            break
        document = owner_of[draw - shift]
        if draw - shift == unused_of[document]:
            continue
        first_draw = unused_of[document] - usual_of[document] + shift
        bounds = first_view[document], stop_view[document]
        samples_of[document] = _count_one(ends_view, bounds, targets_view[first_draw:], rules.min_sentences)
        shift += samples_of[document] - usual_of[document]
        walked = unused_of[document] + shift + 1
    return samples


def _count_one(ends: memoryview, bounds: tuple[int, int], targets: memoryview, min_sentences: int) -> int:
    """Count the samples that `_cut_in_parallel` makes of one document."""
    start, last = bounds
    samples = 0
    while start < last:
        end = bisect_left(ends, ends[start] + targets[samples], start, last)
        end = max(end, start + min_sentences)
        start = end if last - end > 1 else last
        samples += 1
    return samples


def _view(values: np.ndarray) -> memoryview:
    return np.ascontiguousarray(values).data


def _permutation(count: int, seed: int) -> np.ndarray:
    """Shuffle range(count) by Fisher-Yates with std::mt19937_64(seed), int64 [count]."""
    words = MersenneTwister64(seed)
    order = np.arange(count)
    view = order.data
    for high in range(count - 1, 0, -CHUNK):
        places = np.arange(high, max(high - CHUNK, 0), -1, dtype=np.uint64)
        others = words.draw(len(places)) % (places + 1)
        for i, j in zip(places.tolist(), others.tolist(), strict=True):
            view[i], view[j] = view[j], view[i]
    return order


def load_or_build(request: IndexRequest, rules: CutRules) -> MappedArrays:
    """Load the sentence map (`build_map`), the only array, from the cache, or build and cache it.

    Raises:
        InputError: no document is usable, the map would not fit in memory, or the cache is not writable.
    """
    dataset, documents, samples = request.dataset, request.documents, request.samples
    bounds = np.array(dataset.doc_idx[documents.start : documents.stop + 1], dtype=np.int64)
    check_memory(f"{dataset.prefix}: {samples:,} samples", needed=40 * samples)

    def build() -> list[np.ndarray]:
        enough, not_long = usable_documents(dataset.sizes, bounds, rules.min_sentences)
        usable = enough & not_long
        if not usable.any():
            raise InputError(_why_none(request, rules, enough))
        rows = build_map(dataset.sizes, bounds, usable, rules, samples=samples, seed=request.seed)
        logger.debug(
            f"{request.split} data {dataset.prefix}: {len(documents):,} documents; skipped: {np.sum(~enough):,} with "
            f"fewer than {rules.min_sentences} sentences, {np.sum(enough & ~not_long):,} with a sentence of more than "
            f"{LONG_SENTENCE} tokens ({_unused_fraction(dataset.sizes, bounds, usable):.0%} of the tokens); "
            f"samples: {len(rows):,}, needed: {samples:,}"
        )
        for note in _notes(dataset, bounds, rules):
            logger.info(f"{request.split} data {note}")
        return [rows]

    return cached_arrays(
        *request.cache_entry("bert", f"{rules.longest}tl", dataclasses.asdict(rules)),
        ("map",),
        build,
    )


def _unused_fraction(sizes: np.ndarray, bounds: np.ndarray, usable: np.ndarray) -> float:
    """Return the fraction of the tokens that lie in unusable documents."""
    ends = np.concatenate(([0], np.cumsum(sizes[bounds[0] : bounds[-1]], dtype=np.int64)))
    tokens = np.diff(ends[bounds - bounds[0]])
    return float(tokens[~usable].sum() / max(1, ends[-1]))


def _notes(dataset: IndexedDataset, bounds: np.ndarray, rules: CutRules) -> Iterator[str]:
    """Yield notes on data that is probably not as intended."""
    long = np.flatnonzero(dataset.sizes[bounds[0] : bounds[-1]] > rules.longest)
    if len(long):
        first = int(bounds[0] + long[0])
        yield (
            f"{dataset.idx_path}: {len(long):,} sentences are longer than the {rules.longest} tokens of a sample "
            f"(--seq-length minus {SPECIAL_TOKENS}) and will be truncated; the first is sentence {first}, with "
            f"{dataset.sizes[first]:,} tokens"
        )
    if rules.min_sentences == 1 and len(bounds) - 1 == bounds[-1] - bounds[0]:
        yield (
            f"{dataset.idx_path}: every document has one sentence and gives one sample; if these are whole documents, "
            "preprocess the text with megatron preprocess --split-sentences"
        )


def _why_none(request: IndexRequest, rules: CutRules, enough: np.ndarray) -> str:
    """Explain why no document is usable."""
    dataset, documents = request.dataset, request.documents
    subject = f"{dataset.idx_path}: the {len(documents):,} documents for {request.split}"
    if not enough.any():
        return (
            f"{subject} have at most one sentence each, but sentence-order prediction needs two; preprocess the text "
            "with megatron preprocess --split-sentences, or give --bert-no-binary-head"
        )
    document = documents.start + int(np.argmax(enough))
    first, stop = dataset.doc_idx[document : document + 2]
    sentence = int(np.argmax(dataset.sizes[first:stop] > LONG_SENTENCE))
    return (
        f"{subject} with enough sentences all have one of more than {LONG_SENTENCE} tokens, such as sentence "
        f"{sentence} of document {document} with {dataset.sizes[first + sentence]:,}; preprocess text "
        "that has sentences with megatron preprocess --split-sentences"
    )
