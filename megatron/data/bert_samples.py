"""BERT samples: two segments of text whose order is predicted, with masked words to predict.

Devlin et al., "BERT", 2018 (1810.04805); sentence order and masks of up to three words from Lan et al., "ALBERT", 2019
(1909.11942). For the same seed a sample equals Megatron-LM's, which draws random numbers in this order.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from megatron.data.config import DataConfig
from megatron.errors import InputError
from megatron.tokenizer import Tokenizer
from megatron.tokenizer.bert import BertWordPieceTokenizer

MAX_WORDS = 3  # masked together
IGNORED = -1  # label of a token that is not predicted
# Probabilities of masking up to 1, 2 and 3 words together, with weight 1/n for n; rounded as numpy's choice() does.
WEIGHTS = 1.0 / np.arange(1, MAX_WORDS + 1)
CUMULATIVE = (WEIGHTS / WEIGHTS.sum() / (WEIGHTS / WEIGHTS.sum()).sum()).cumsum()
UP_TO = (CUMULATIVE / CUMULATIVE[-1]).tolist()


@dataclasses.dataclass(frozen=True)
class SampleRules:
    """Rules that turn sentences into a sample.

    Attributes:
        seq_length: length that samples are padded to.
        mask_prob: fraction of the tokens to predict.
        binary_head: make two segments, in order or swapped; otherwise one.
        vocab_size: random replacements of a masked token are below this.
        cls, sep, mask, pad: ids of these tokens.
        continues: bool [vocab_size], True for pieces that continue a word ('##ing').
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
        """Derive the rules from the flags.

        Raises:
            InputError: `tokenizer` is not a BERT tokenizer.
        """
        if not isinstance(tokenizer, BertWordPieceTokenizer):
            raise InputError(
                f"--tokenizer-type: {tokenizer.name} has no word boundaries, but BERT masks whole words; use "
                "BertWordPieceLowerCase or BertWordPieceCase, with the vocab.txt of a BERT model"
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


def build_sample(
    text: np.ndarray, sentences: Sequence[int], target: int, rules: SampleRules, rng: np.random.RandomState
) -> dict[str, np.ndarray]:
    """Build a sample from sentences.

    Args:
        text: int64 [tokens], the tokens of all sentences.
        sentences: tokens in each sentence; at least two sentences with a binary head.
        target: maximum number of tokens to keep, from 2 to `seq_length` minus the three special tokens.
        rng: source of all random numbers.

    Returns:
        text: int64 [seq], [CLS] A [SEP] B [SEP] [PAD]..., or [CLS] A [SEP] [PAD]..., with some words masked.
        types: int64 [seq], 1 for B and the [SEP] after it, otherwise 0.
        labels: int64 [seq], the original token where it is predicted, otherwise -1.
        is_random: int64 [], 1 if A and B were swapped, so that B comes first in the document.
        loss_mask: int64 [seq], 1 where a token is predicted.
        padding_mask: int64 [seq], 0 on padding.
        truncated: int64 [], 1 if text was truncated.
    """
    a, b = text, text[:0]
    swapped = False
    if rules.binary_head:
        split = rng.randint(1, len(sentences)) if len(sentences) >= 3 else 1
        border = sum(sentences[:split])
        a, b = text[:border], text[border:]
        swapped = rng.random_sample() < 0.5
        if swapped:
            a, b = b, a
    truncated = len(text) > target
    if truncated:
        a, b = _truncate(a, b, target, rng)

    cls, sep = np.array([rules.cls]), np.array([rules.sep])
    tokens = np.concatenate([cls, a, sep, b, sep] if len(b) else [cls, a, sep])
    size = len(tokens)
    masked, predicted = _mask_words(tokens, target, rules, rng)
    padded = np.full(rules.seq_length, rules.pad)
    padded[:size] = masked
    types = np.zeros(rules.seq_length, dtype=np.int64)
    types[len(a) + 2 : size] = 1
    labels = np.full(rules.seq_length, IGNORED)
    labels[:size] = predicted
    return {
        "text": padded,
        "types": types,
        "labels": labels,
        "is_random": np.array(swapped, dtype=np.int64),
        "loss_mask": (labels != IGNORED).astype(np.int64),
        "padding_mask": (np.arange(rules.seq_length) < size).astype(np.int64),
        "truncated": np.array(truncated, dtype=np.int64),
    }


def _truncate(
    a: np.ndarray, b: np.ndarray, target: int, rng: np.random.RandomState
) -> tuple[np.ndarray, np.ndarray]:
    """Drop tokens from a random end of the longer segment (b on a tie), one at a time, until `target` are left."""
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
    """Choose whole words to predict, up to three consecutive ones at a time, and mask them.

    80% of the chosen tokens become [MASK], 10% a random token of the vocabulary, and 10% stay unchanged.

    Returns:
        The masked tokens and the labels, int64 [tokens] each.
    """
    masked, labels = tokens.copy(), np.full(len(tokens), IGNORED)
    pieces = np.flatnonzero((tokens != rules.cls) & (tokens != rules.sep))
    # A word is a piece and the pieces that continue it, even across segments that were split within a word.
    starts = ~rules.continues[tokens[pieces]]
    starts[:1] = True
    bounds = [*np.flatnonzero(starts).tolist(), len(pieces)]
    words = len(bounds) - 1
    needed = int(min(rules.mask_prob * target, max(1, round(len(tokens) * rules.mask_prob))))

    order = np.arange(words)
    rng.shuffle(order)
    random = rng.random_sample
    taken = bytearray(len(pieces))
    chosen: list[int] = []
    replacements: list[int] = []
    for word in order.tolist():
        if len(chosen) == needed:
            break
        count = 1 + bisect_right(UP_TO, random())
        first, stop = bounds[word], bounds[min(word + count, words)]
        while len(chosen) + stop - first > needed and count > 1:
            count -= 1
            stop = bounds[min(word + count, words)]
        if len(chosen) + stop - first > needed or any(taken[first:stop]):
            continue
        for piece in range(first, stop):
            taken[piece] = True
            chosen.append(piece)
            if random() < 0.8:
                replacements.append(rules.mask)
            elif random() < 0.5:
                replacements.append(int(tokens[pieces[piece]]))
            else:
                replacements.append(rng.randint(0, rules.vocab_size))
    positions = pieces[chosen]
    labels[positions] = tokens[positions]
    masked[positions] = replacements
    return masked, labels
