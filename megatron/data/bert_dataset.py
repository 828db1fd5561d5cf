"""BERT samples: two segments of text whose order is to be judged, and words masked that are to be guessed.

Devlin et al., "BERT", 2018 (1810.04805); order of segments and masks of up to three words from Lan et al., "ALBERT",
2019 (1909.11942). For equal seeds a sample equals Megatron-LM's, which asks for random numbers in this order.
"""

from __future__ import annotations

import dataclasses
import threading
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from megatron.data.bert_index import SPECIAL_TOKENS
from megatron.data.config import DataConfig
from megatron.data.index_cache import MappedArrays
from megatron.data.indexed import IndexedDataset
from megatron.flags import InputError
from megatron.tokenizer import Tokenizer

MAX_WORDS = 3  # masked together
IGNORED = -1  # label of a token that is not to be guessed
# Chances of up to 1, 2 and 3 words, 1/n being the weight of n; the roundings are those of numpy's choice().
WEIGHTS = 1.0 / np.arange(1, MAX_WORDS + 1)
CHANCES = (WEIGHTS / WEIGHTS.sum() / (WEIGHTS / WEIGHTS.sum()).sum()).cumsum()
UP_TO = (CHANCES / CHANCES[-1]).tolist()


@dataclasses.dataclass(frozen=True)
class SampleRules:
    """How a sample is made of sentences.

    Attributes:
        seq_length: to which samples are padded.
        mask_prob: share of the tokens that are to be guessed.
        binary_head: make two segments, in order or exchanged; else one.
        vocab_size: ids that a masked token may be replaced by are below this.
        cls, sep, mask, pad: ids of these tokens.
        continues: bool [vocab_size], whether a piece goes on with the word of the piece before ('##ing').
    """

    seq_length: int
    mask_prob: float
    binary_head: bool
    vocab_size: int
    cls: int
    sep: int
    mask: int
    pad: int
    continues: np.ndarray

    @classmethod
    def of(cls, config: DataConfig, tokenizer: Tokenizer) -> SampleRules:
        """The rules that flags stand for.

        Raises:
            InputError: `tokenizer` is not one of BERT's.
        """
        if tokenizer.name not in ("BertWordPieceLowerCase", "BertWordPieceCase"):
            raise InputError(
                f"--tokenizer-type: {tokenizer.name} does not tell which tokens make up a word, and BERT is trained on "
                "masked words; use BertWordPieceLowerCase or BertWordPieceCase, with the vocab.txt of a BERT model"
            )
        return cls(
            seq_length=config.seq_length,
            mask_prob=config.mask_prob,
            binary_head=config.bert_binary_head,
            vocab_size=tokenizer.vocab_size,
            cls=tokenizer.cls,
            sep=tokenizer.sep,
            mask=tokenizer.mask,
            pad=tokenizer.pad,
            continues=np.array([piece.startswith("##") for piece in tokenizer.vocab]),
        )


class BertSamples:
    """How samples of BERT become a batch: what the loader asks of a data set.

    Attributes:
        length_multiple: a batch is as long as its longest sample, rounded up to a multiple of this.
    """

    length_multiple: int

    def stack(self, samples: Sequence[dict[str, np.ndarray]], seq_length: int) -> dict[str, np.ndarray]:
        """In a worker: text, types [samples, longest], and padding_mask where there is padding; positions of the words
        to be guessed, labels, loss_mask [samples, most of a sample], zero where a sample has fewer; is_random
        [samples]."""
        longest = max((int(sample["padding_mask"].sum()) for sample in samples), default=1)
        length = min(-(-longest // self.length_multiple) * self.length_multiple, seq_length)
        places = [np.flatnonzero(sample["loss_mask"]) for sample in samples]
        most = max(map(len, places), default=0)
        stacked = {
            name: np.stack([sample[name][:length] for sample in samples])
            if samples
            else np.zeros((0, length), dtype=np.int64)
            for name in ("text", "types", "padding_mask")
        }
        for name in ("positions", "labels", "loss_mask"):
            stacked[name] = np.zeros((len(samples), most), dtype=np.int64)
        for i, (sample, at) in enumerate(zip(samples, places, strict=True)):
            stacked["positions"][i, : len(at)] = at
            stacked["labels"][i, : len(at)] = sample["labels"][at]
            stacked["loss_mask"][i, : len(at)] = 1
        if stacked["padding_mask"].all():
            del stacked["padding_mask"]
        stacked["is_random"] = np.array([sample["is_random"] for sample in samples], dtype=np.int64)
        return stacked

    @staticmethod
    def fields(stacked: dict[str, np.ndarray], eod: int | None, config: DataConfig) -> dict[str, np.ndarray]:
        """In the training process: what `stack` gives, with loss_mask as float32."""
        return stacked | {"loss_mask": stacked["loss_mask"].astype(np.float32)}


class BertDataset(BertSamples):
    """Samples of a map of `megatron.data.bert_index`. A sample depends on the data, the seed and its index alone.

    Pickles as paths, so that a worker process maps the files anew.
    """

    def __init__(
        self,
        tokens: IndexedDataset,
        index: MappedArrays,
        rules: SampleRules,
        seed: int,
        length_multiple: int = 8,
    ) -> None:
        self.tokens = tokens
        self.index = index
        self.rules = rules
        self.seed = seed
        self.length_multiple = length_multiple
        (self._map,) = index
        # To make a generator takes a hundred times as long as to seed one; two threads may not share it, though.
        self._rng, self._lock = np.random.RandomState(), threading.Lock()

    def __len__(self) -> int:
        return len(self._map)

    def __reduce__(
        self,
    ) -> tuple[type[BertDataset], tuple[IndexedDataset, MappedArrays, SampleRules, int, int]]:
        return BertDataset, (self.tokens, self.index, self.rules, self.seed, self.length_multiple)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """Sample `i`, as `build_sample` makes it.

        Raises:
            InputError: a token id is not in the vocabulary.
        """
        start, end, target = self._map[i].tolist()
        sentences = [self.tokens.get(sentence) for sentence in range(start, end)]
        text = np.concatenate(sentences).astype(np.int64)
        if len(text) and (text.min() < 0 or text.max() >= self.rules.vocab_size):
            raise InputError(self._foreign_token(start, end, i))
        with self._lock:
            self._rng.seed((self.seed + i) % 2**32)
            return build_sample(text, [len(s) for s in sentences], target, self.rules, self._rng)

    def _foreign_token(self, start: int, end: int, i: int) -> str:
        for sentence in range(start, end):
            ids = self.tokens.get(sentence).astype(np.int64)
            foreign = (ids < 0) | (ids >= self.rules.vocab_size)
            if foreign.any():
                at = int(np.argmax(foreign))
                return (
                    f"{self.tokens.bin_path}: token {at} of sentence {sentence} (in sample {i}) is id {ids[at]}, but "
                    f"the vocabulary has {self.rules.vocab_size} ids; the file was made with another tokenizer, or is "
                    "damaged"
                )
        raise AssertionError(f"sample {i} holds no foreign token")


class MockBertDataset(BertSamples):
    """Synthetic samples that a model can learn: each counts up by a step of its own, in two segments.

    A sample depends on the seed and its index alone. Ids 0 to 3 stand for [PAD], [CLS], [SEP] and [MASK].
    """

    SPECIAL_IDS = 4
    RANGE = 1000  # ids of words, so that what there is to learn does not grow with the vocabulary
    MAX_STEP = 4

    def __init__(
        self,
        samples: int,
        config: DataConfig,
        *,
        vocab_size: int,
        seed: tuple[int, ...],
        length_multiple: int = 8,
    ) -> None:
        if vocab_size <= self.SPECIAL_IDS:
            raise InputError(
                f"--mock-data: takes a vocabulary of more than {self.SPECIAL_IDS} ids, the first of which are special "
                f"tokens; this one has {vocab_size}"
            )
        self.samples = samples
        self.length_multiple = length_multiple
        self.words = min(vocab_size - self.SPECIAL_IDS, self.RANGE)
        self.rules = SampleRules(
            seq_length=config.seq_length,
            mask_prob=config.mask_prob,
            binary_head=config.bert_binary_head,
            vocab_size=self.SPECIAL_IDS + self.words,
            pad=0,
            cls=1,
            sep=2,
            mask=3,
            continues=np.zeros(vocab_size, dtype=bool),
        )
        self.seed = seed

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """Sample `i`, as `build_sample` makes it; of half the sequence's length at least."""
        rng = np.random.RandomState(np.random.PCG64((*self.seed, i)))
        longest = self.rules.seq_length - SPECIAL_TOKENS
        start, step = rng.randint(self.words), rng.randint(1, self.MAX_STEP + 1)
        length = rng.randint(max(2, longest // 2), longest + 1)
        first = rng.randint(1, length)
        text = self.SPECIAL_IDS + (start + step * np.arange(length)) % self.words
        return build_sample(text, [first, length - first], longest, self.rules, rng)


def build_sample(
    text: np.ndarray, sentences: Sequence[int], target: int, rules: SampleRules, rng: np.random.RandomState
) -> dict[str, np.ndarray]:
    """Make a sample of sentences.

    Args:
        text: int64 [tokens], all sentences, one after the other.
        sentences: tokens in each; two sentences at least where there is a binary head.
        target: tokens of text to keep at most, from 2 to `seq_length` less the three special ones.
        rng: what chance decides is drawn from it.

    Returns:
        text: int64 [seq], [CLS] A [SEP] B [SEP] [PAD]..., or [CLS] A [SEP] [PAD]..., some words masked.
        types: int64 [seq], 1 for B and the [SEP] after it, else 0.
        labels: int64 [seq], the token where it is to be guessed, else -1.
        is_random: int64 [], 1 where A and B were exchanged, so that B comes first in the document.
        loss_mask: int64 [seq], 1 where a token is to be guessed.
        padding_mask: int64 [seq], 0 on the padding.
        truncated: int64 [], 1 where text was cut off.
    """
    a, b = text, text[:0]
    exchanged = False
    if rules.binary_head:
        split = rng.randint(1, len(sentences)) if len(sentences) >= 3 else 1
        border = sum(sentences[:split])
        a, b = text[:border], text[border:]
        exchanged = rng.random_sample() < 0.5
        if exchanged:
            a, b = b, a
    truncated = len(text) > target
    if truncated:
        a, b = _truncate(a, b, target, rng)

    parts = [[rules.cls], a, [rules.sep]] + ([b, [rules.sep]] if len(b) else [])
    tokens = np.concatenate(parts)
    size = len(tokens)
    masked, labels = _mask_words(tokens, target, rules, rng)
    sample = {
        "text": np.full(rules.seq_length, rules.pad),
        "types": np.zeros(rules.seq_length, dtype=np.int64),
        "labels": np.full(rules.seq_length, IGNORED),
        "is_random": np.int64(exchanged),
        "padding_mask": np.zeros(rules.seq_length, dtype=np.int64),
        "truncated": np.int64(truncated),
    }
    sample["text"][:size] = masked
    sample["types"][len(a) + 2 : size] = 1
    sample["labels"][:size] = labels
    sample["padding_mask"][:size] = 1
    sample["loss_mask"] = (sample["labels"] != IGNORED).astype(np.int64)
    return sample


def _truncate(
    a: np.ndarray, b: np.ndarray, target: int, rng: np.random.RandomState
) -> tuple[np.ndarray, np.ndarray]:
    """Take single tokens off the longer segment (b if neither is), from either end, until `target` are left."""
    starts, ends = [0, 0], [len(a), len(b)]
    from_the_start = rng.random_sample(len(a) + len(b) - target) < 0.5
    for at_start in from_the_start.tolist():
        longer = 0 if ends[0] - starts[0] > ends[1] - starts[1] else 1
        if at_start:
            starts[longer] += 1
        else:
            ends[longer] -= 1
    return a[starts[0] : ends[0]], b[starts[1] : ends[1]]


def _mask_words(
    tokens: np.ndarray, target: int, rules: SampleRules, rng: np.random.RandomState
) -> tuple[np.ndarray, np.ndarray]:
    """Choose tokens to be guessed, by whole words and up to three of these at a time, and hide them.

    Of the chosen tokens 80% become [MASK], 10% any token of the vocabulary, and 10% stay as they are.

    Returns:
        int64 [tokens] each: the tokens with the chosen ones hidden, and the labels.
    """
    masked, labels = tokens.copy(), np.full(len(tokens), IGNORED)
    pieces = np.flatnonzero((tokens != rules.cls) & (tokens != rules.sep))
    # A word is a piece and those that continue it, also from one segment to the next where that was cut within a word.
    starts = ~rules.continues[tokens[pieces]]
    starts[:1] = True
    bounds = [*np.flatnonzero(starts).tolist(), len(pieces)]
    words = len(bounds) - 1
    wanted = int(min(rules.mask_prob * target, max(1, round(len(tokens) * rules.mask_prob))))

    order = np.arange(words)
    rng.shuffle(order)
    chance = rng.random_sample
    taken = bytearray(len(pieces))
    chosen: list[int] = []
    hidden: list[int] = []
    for word in order.tolist():
        if len(chosen) == wanted:
            break
        count = 1 + bisect_right(UP_TO, chance())
        first, stop = bounds[word], bounds[min(word + count, words)]
        while len(chosen) + stop - first > wanted and count > 1:
            count -= 1
            stop = bounds[min(word + count, words)]
        if len(chosen) + stop - first > wanted or any(taken[first:stop]):
            continue
        for piece in range(first, stop):
            taken[piece] = True
            chosen.append(piece)
            if chance() < 0.8:
                hidden.append(rules.mask)
            elif chance() < 0.5:
                hidden.append(int(tokens[pieces[piece]]))
            else:
                hidden.append(rng.randint(0, rules.vocab_size))
    places = pieces[chosen]
    labels[places] = tokens[places]
    masked[places] = hidden
    return masked, labels
