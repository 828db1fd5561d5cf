"""Which sentences make up a BERT sample: the sentence map of Megatron-LM.

Each document is cut, sentence by sentence, into samples that reach a target length. Most targets are the longest that
fits the sequence; a share of them (--short-seq-prob) is shorter, by chance. All documents are gone through as many
times over as it takes ("epochs"), and the samples then shuffled. For equal seeds the map equals Megatron-LM's.

There a random number is drawn for each target in turn, so where a document's draws begin depends on how all
documents before it were cut. Yet only a short target cuts a document otherwise than a full one does: so all are cut
side by side by full targets, those that meet a short one are cut again one by one, and then it is known which draws
belong to which document, and all are cut side by side by their own targets.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
from bisect import bisect_left
from collections.abc import Callable, Iterator

import numpy as np

from megatron.data.index_cache import MappedArrays, cached_arrays, check_memory, file_fingerprint, spread
from megatron.data.indexed import IndexedDataset
from megatron.data.mersenne_twister import MersenneTwister64
from megatron.flags import InputError

logger = logging.getLogger("megatron")

LONG_SENTENCE = 512  # a document of several sentences is left out if one of them has more tokens than this
SPECIAL_TOKENS = 3  # [CLS] A [SEP] B [SEP]
CHUNK = 1 << 18  # documents or samples worked on at once


@dataclasses.dataclass(frozen=True)
class CutRules:
    """How documents are cut into samples.

    Attributes:
        longest: full target length, in tokens.
        short_every: one in so many targets is short, 2 to `longest` tokens; 0 for none.
        min_sentences: in a sample.
    """

    longest: int
    short_every: int
    min_sentences: int

    @classmethod
    def of(cls, *, seq_length: int, short_seq_prob: float, binary_head: bool) -> CutRules:
        """The rules that flags stand for. The binary head judges the order of two sentences, at least."""
        every = math.floor(min(1 / short_seq_prob, 2**32) + 0.5) if short_seq_prob > 0 else 0
        return cls(seq_length - SPECIAL_TOKENS, every, 2 if binary_head else 1)


class Targets:
    """The target lengths of all samples to come, in the order in which they are drawn.

    As in Megatron-LM one random word decides both whether a target is short and how short, so that only every d-th
    short length occurs, d being the greatest common divisor of `short_every` and `longest` - 1.
    """

    def __init__(self, rules: CutRules, seed: int) -> None:
        self._rules = rules
        self._rng = np.random.RandomState(seed)  # its 32-bit words are those of std::mt19937
        self._ahead = np.empty(0, dtype=np.int64)

    def peek(self, count: int) -> np.ndarray:
        """int64 [at least count]: the next targets."""
        if count > len(self._ahead):
            self._ahead = np.concatenate([self._ahead, self._draw(count - len(self._ahead))])
        return self._ahead

    def skip(self, count: int) -> None:
        """Go past the next `count` targets, which have been looked at."""
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
        sizes: int32 [sentences], tokens in each.
        bounds: int64 [documents + 1], the sentence at which each document starts, and the last one's end.
        usable: bool [documents], some of them true: which to take, from `usable_documents`.
        samples: how many are wanted at least; what the last epoch has beyond them is kept.
        seed: of the target lengths; the samples are shuffled by `seed` + 1.

    Returns:
        uint32 [samples, 3] (uint64 where sentence numbers need it), a row for each sample: its first sentence, the
        sentence after its last, and its target length, to which it is to be truncated.
    """
    dtype = np.uint32 if len(sizes) < 2**32 else np.uint64
    targets = Targets(rules, seed)
    parts, made = [], 0
    while made < samples:
        for at in range(0, len(usable), CHUNK):
            documents = at + np.flatnonzero(usable[at : at + CHUNK])
            if len(documents):
                part = _cut(sizes, bounds[documents], bounds[documents + 1], rules, targets)
                parts.append(part.astype(dtype))
                made += len(part)
    rows = np.concatenate(parts)
    del parts
    return rows[_shuffled(len(rows), seed + 1)]


def usable_documents(
    sizes: np.ndarray, bounds: np.ndarray, min_sentences: int
) -> tuple[np.ndarray, np.ndarray]:
    """bool [documents] each: which have sentences enough, and which, being of several, hold none too long."""
    sentences = np.diff(bounds)
    long = bounds[0] + np.flatnonzero(sizes[bounds[0] : bounds[-1]] > LONG_SENTENCE)
    holds_long = np.zeros(len(sentences), dtype=bool)
    holds_long[np.searchsorted(bounds, long, side="right") - 1] = True
    return sentences >= min_sentences, ~holds_long | (sentences == 1)


def _cut(
    sizes: np.ndarray, first: np.ndarray, stop: np.ndarray, rules: CutRules, targets: Targets
) -> np.ndarray:
    """The samples of some documents, int64 [samples, 3], in order; takes their targets.

    Args:
        first, stop: int64 [documents], the sentences of each.
    """
    origin = first[0]
    first, stop = first - origin, stop - origin
    ends = np.zeros(stop[-1] + 1, dtype=np.int64)  # tokens before each sentence, and after the last
    np.cumsum(sizes[origin : origin + stop[-1]], out=ends[1:])
    # At most; each document also draws a target after its last sample, which goes unused.
    draws = int(((stop - first) // rules.min_sentences + 1).sum())
    ahead = targets.peek(draws)
    samples = _count_samples(ends, first, stop, rules, ahead)
    last_draw = np.cumsum(samples + 1) - 1
    targets.skip(int(last_draw[-1]) + 1)

    first_draw = last_draw - samples
    first_row = first_draw - np.arange(len(first))
    rows = np.empty((int(samples.sum()), 3), dtype=np.int64)
    cut = _side_by_side(ends, first, stop, rules, lambda documents, i: ahead[first_draw[documents] + i])
    for i, (documents, start, end, target) in enumerate(cut):
        at = first_row[documents] + i
        rows[at, 0] = origin + start
        rows[at, 1] = origin + end
        rows[at, 2] = target
    return rows


def _side_by_side(
    ends: np.ndarray,
    first: np.ndarray,
    stop: np.ndarray,
    rules: CutRules,
    target_of: Callable[[np.ndarray, int], np.ndarray | int],
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | int]]:
    """Cut a first sample of every document, then a second of all that have more sentences, and so on.

    Yields:
        the documents, and of the sample of each its first sentence, the one after its last, and its target, which
        is `target_of(documents, i)` for the i-th samples.
    """
    documents, start = np.arange(len(first)), first
    i = 0
    while len(documents):
        target = target_of(documents, i)
        end = np.searchsorted(ends, ends[start] + target)
        np.maximum(end, start + rules.min_sentences, out=end)
        # A single sentence is not left over: the sample takes all the rest instead.
        last = stop[documents]
        end = np.where(last - end > 1, end, last)
        yield documents, start, end, target
        more = end < last
        documents, start = documents[more], end[more]
        i += 1


def _count_samples(
    ends: np.ndarray, first: np.ndarray, stop: np.ndarray, rules: CutRules, targets: np.ndarray
) -> np.ndarray:
    """int64 [documents]: samples of each, where the first document's first target is the first of `targets`."""
    usual = np.zeros(len(first), dtype=np.int64)  # with full targets alone
    for documents, *_ in _side_by_side(ends, first, stop, rules, lambda *_: rules.longest):
        usual[documents] += 1
    unused = np.cumsum(usual + 1) - 1  # the draw that follows a document's last sample
    owner = np.repeat(np.arange(len(first)), usual + 1)
    samples = usual.copy()

    # Plain integers for the loop: a memoryview gives them several times faster than an array.
    view = [memoryview(a) for a in (ends, np.ascontiguousarray(first), np.ascontiguousarray(stop), targets)]
    owner_of, unused_of, usual_of, samples_of = map(memoryview, (owner, unused, usual, samples))
    shift = 0  # how many draws more than usual the documents so far have taken
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
        samples_of[document] = _walk(*view, document, rules.min_sentences, first_draw)
        shift += samples_of[document] - usual_of[document]
        walked = unused_of[document] + shift + 1
    return samples


def _walk(
    ends: memoryview,
    first: memoryview,
    stop: memoryview,
    targets: memoryview,
    document: int,
    min_sentences: int,
    draw: int,
) -> int:
    """How many samples `_side_by_side` cuts one document into, its targets beginning with number `draw`."""
    start, last = first[document], stop[document]
    samples = 0
    while start < last:
        end = bisect_left(ends, ends[start] + targets[draw + samples], start, last)
        end = max(end, start + min_sentences)
        start = end if last - end > 1 else last
        samples += 1
    return samples


def _shuffled(count: int, seed: int) -> np.ndarray:
    """int64 [count]: numbers from 0 in the order of a shuffle of Fisher and Yates by std::mt19937_64(seed)."""
    words = MersenneTwister64(seed)
    order = np.arange(count)
    view = memoryview(order)
    for high in range(count - 1, 0, -CHUNK):
        places = np.arange(high, max(high - CHUNK, 0), -1, dtype=np.uint64)
        others = words.draw(len(places)) % (places + 1)
        for i, j in zip(places.tolist(), others.tolist(), strict=True):
            view[i], view[j] = view[j], view[i]
    return order


def load_or_build(
    dataset: IndexedDataset,
    documents: range,
    rules: CutRules,
    *,
    name: str,
    samples: int,
    seed: int,
    cache: str,
) -> MappedArrays:
    """The sentence map (`build_map`) as the only array, from the cache where it is in it.

    Args:
        documents: which documents of `dataset` to take.
        name: what these are for ('train', 'valid' or 'test').
        samples: how many are wanted at least.
        cache: folder of the cache.

    Raises:
        InputError: no sample can be made of `documents`, the map would not fit in memory, or the cache cannot be
            written.
    """
    bounds = np.array(dataset.doc_idx[documents.start : documents.stop + 1], dtype=np.int64)
    check_memory(f"{dataset.prefix}: {samples:,} samples", needed=40 * samples)

    def build() -> list[np.ndarray]:
        enough, not_long = usable_documents(dataset.sizes, bounds, rules.min_sentences)
        usable = enough & not_long
        if not usable.any():
            raise InputError(_why_none(dataset, documents, name, rules, enough))
        rows = build_map(dataset.sizes, bounds, usable, rules, samples=samples, seed=seed)
        logger.info(
            f"{name} data {dataset.prefix}: {len(documents):,} documents, of which {np.sum(~enough):,} with fewer than "
            f"{rules.min_sentences} sentences and {np.sum(enough & ~not_long):,} with a sentence of more than "
            f"{LONG_SENTENCE} tokens are left out, {_share_left(dataset.sizes, bounds, usable):.0%} of the tokens; "
            f"{samples:,} samples wanted, {len(rows):,} made"
        )
        for note in _notes(dataset, bounds, rules):
            logger.info(f"{name} data {note}")
        return [rows]

    return cached_arrays(
        cache,
        f"{os.path.basename(dataset.prefix)[:100]}-{name}-{samples}ns-{rules.longest}tl-{seed}s",
        {
            "kind": "bert",
            "data": file_fingerprint(dataset.idx_path),
            "documents": [documents.start, documents.stop],
            "samples": samples,
            "seed": seed,
            **dataclasses.asdict(rules),
        },
        ("map",),
        build,
        lambda arrays: _sound(arrays[0], bounds, rules) and len(arrays[0]) >= samples,
    )


def _share_left(sizes: np.ndarray, bounds: np.ndarray, usable: np.ndarray) -> float:
    """Tokens of the documents that are not used, as a share of all."""
    ends = np.concatenate(([0], np.cumsum(sizes[bounds[0] : bounds[-1]], dtype=np.int64)))
    tokens = np.diff(ends[bounds - bounds[0]])
    return float(tokens[~usable].sum() / max(1, ends[-1]))


def _notes(dataset: IndexedDataset, bounds: np.ndarray, rules: CutRules) -> Iterator[str]:
    """What may not be meant so."""
    long = np.flatnonzero(dataset.sizes[bounds[0] : bounds[-1]] > rules.longest)
    if len(long):
        first = int(bounds[0] + long[0])
        yield (
            f"{dataset.idx_path}: {len(long):,} sentences, the first of them sentence {first} with "
            f"{dataset.sizes[first]:,} tokens, are longer than a sample's {rules.longest} (--seq-length less "
            f"{SPECIAL_TOKENS}); what is more is cut off"
        )
    if rules.min_sentences == 1 and len(bounds) - 1 == bounds[-1] - bounds[0]:
        yield (
            f"{dataset.idx_path}: every document is one sentence, and gives one sample; if they are whole documents, "
            "make the data with tools/preprocess_data.py --split-sentences"
        )


def _sound(rows: np.ndarray, bounds: np.ndarray, rules: CutRules) -> bool:
    """Whether an array found on disk can be a map of documents with these `bounds`."""
    if rows.shape[1:] != (3,) or rows.dtype.kind != "u":
        return False
    start, end, target = spread(rows).astype(np.int64).T
    return bool(
        (start >= bounds[0]).all()
        and (end <= bounds[-1]).all()
        and (end - start >= rules.min_sentences).all()
        and (target >= 2).all()
        and (target <= rules.longest).all()
    )


def _why_none(
    dataset: IndexedDataset, documents: range, name: str, rules: CutRules, enough: np.ndarray
) -> str:
    """Why no document gives a sample, in a line."""
    count = f"{dataset.idx_path}: the {len(documents):,} documents for {name}"
    if not enough.any():
        return (
            f"{count} have one sentence each, or none, and to learn their order takes two; make the data with "
            "tools/preprocess_data.py --split-sentences, or give --bert-no-binary-head"
        )
    document = documents.start + int(np.argmax(enough))
    first, stop = dataset.doc_idx[document : document + 2]
    sentence = int(np.argmax(dataset.sizes[first:stop] > LONG_SENTENCE))
    return (
        f"{count} that have sentences enough all hold one of more than {LONG_SENTENCE} tokens, as sentence {sentence} "
        f"of document {document} with {dataset.sizes[first + sentence]:,}; make the data with "
        "tools/preprocess_data.py --split-sentences, of text that has sentences"
    )
