from __future__ import annotations

import itertools
import json
import math
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from megatron.data.bert_dataset import BertDataset
from megatron.data.bert_index import CutRules, load_or_build
from megatron.data.bert_samples import SampleRules, build_sample
from megatron.data.config import DataConfig
from megatron.data.index_cache import IndexRequest
from megatron.errors import InputError
from megatron.variants.mock_data import MockBertDataset

PAD, CLS, SEP, MASK = 0, 1, 2, 3
VOCABULARY = 60  # every third id from 10 on continues a word


def rules_of(seq_length: int, vocab_size: int = VOCABULARY, **changes) -> SampleRules:
    ids = np.arange(vocab_size)
    values = {
        "seq_length": seq_length,
        "mask_prob": 0.15,
        "binary_head": True,
        "vocab_size": vocab_size,
        "cls": CLS,
        "sep": SEP,
        "mask": MASK,
        "pad": PAD,
        "continues": (ids >= 10) & (ids % 3 == 0),
    }
    return SampleRules(**values | changes)


def joined(lists: list[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(lists))


def reference(sentences: list[list[int]], target: int, rules: SampleRules, seed: int) -> dict[str, list[int]]:
    """Megatron-LM v2.5's sample, built token by token."""
    rng = np.random.RandomState(seed)
    a, b, exchanged = joined(sentences), [], False
    if rules.binary_head:
        split = rng.randint(1, len(sentences)) if len(sentences) >= 3 else 1
        a, b = joined(sentences[:split]), joined(sentences[split:])
        exchanged = bool(rng.random() < 0.5)
        if exchanged:
            a, b = b, a
    truncated = len(a) + len(b) > target
    while len(a) + len(b) > target:
        longer = a if len(a) > len(b) else b
        del longer[0 if rng.random() < 0.5 else -1]
    tokens = [CLS, *a, SEP] + ([*b, SEP] if b else [])
    types = [0] * (len(a) + 2) + ([1] * (len(b) + 1) if b else [])

    words: list[list[int]] = []
    for i, token in enumerate(tokens):
        if token in (CLS, SEP):
            continue
        if words and rules.continues[token]:
            words[-1].append(i)
        else:
            words.append([i])
    limit = min(rules.mask_prob * target, max(1, round(len(tokens) * rules.mask_prob)))
    weights = np.array([1, 1 / 2, 1 / 3]) / np.sum([1, 1 / 2, 1 / 3])
    spans = [[words[i : i + n] for n in (1, 2, 3)] for i in range(len(words))]
    rng.shuffle(spans)
    output, labels = list(tokens), [-1] * len(tokens)
    for span in spans:
        count = sum(label >= 0 for label in labels)
        if count >= limit:
            break
        n = rng.choice([1, 2, 3], p=weights / weights.sum())
        positions = joined(span[n - 1])
        while count + len(positions) > limit and n > 1:
            n -= 1
            positions = joined(span[n - 1])
        if count + len(positions) > limit or any(labels[i] >= 0 for i in positions):
            continue
        for i in positions:
            labels[i] = tokens[i]
            if rng.random() < 0.8:
                output[i] = MASK
            elif rng.random() >= 0.5:
                output[i] = rng.randint(0, rules.vocab_size)
    padding = rules.seq_length - len(tokens)
    return {
        "text": output + [PAD] * padding,
        "types": types + [0] * padding,
        "labels": labels + [-1] * padding,
        "is_random": int(exchanged),
        "loss_mask": [int(label >= 0) for label in labels] + [0] * padding,
        "padding_mask": [1] * len(tokens) + [0] * padding,
        "truncated": int(truncated),
    }


def test_random_sentences_equal_the_reference() -> None:
    trial = np.random.RandomState(0)
    seen = set()
    for seed in range(1500):
        rules = rules_of(
            int(trial.choice([5, 12, 40, 150])),
            binary_head=bool(trial.randint(2)),
            mask_prob=float(trial.choice([0.05, 0.15, 0.4, 1.0])),
        )
        target = trial.randint(2, rules.seq_length - 2)
        count = trial.randint(2 if rules.binary_head else 1, 8)
        longest = int(trial.choice([3, 12, 40]))
        sentences = [
            trial.randint(4, VOCABULARY, size=trial.randint(1, longest)).tolist() for _ in range(count)
        ]
        rng = np.random.RandomState()
        rng.seed(seed)
        sizes = [len(sentence) for sentence in sentences]
        sample = build_sample(np.array(joined(sentences)), sizes, target, rules, rng)
        assert all(values.dtype == np.int64 for values in sample.values())
        expected = reference(sentences, target, rules, seed)
        assert {name: values.tolist() for name, values in sample.items()} == expected
        seen.add((expected["is_random"], expected["truncated"], sum(expected["loss_mask"]) > 0))
    assert len(seen) == 8


# ---- statistics, on words of one token each

CHI_SQUARE = {1: 10.83, 2: 13.82, 8: 26.12, 10: 29.59, 99: 148.23}  # critical values for p = 0.001
SAMPLES = pytest.mark.parametrize("samples", [20_000, pytest.param(100_000, marks=pytest.mark.slow)])


def check_shares(counts: np.ndarray, shares: np.ndarray | list[float]) -> None:
    """Chi-square test of counts against their expected shares, which sum to 1."""
    expected = np.asarray(shares) * np.sum(counts)
    assert len(counts) == len(expected)
    assert ((counts - expected) ** 2 / expected).sum() < CHI_SQUARE[len(expected) - 1], (counts, expected)


@SAMPLES
def test_segments_and_masking(samples: int) -> None:
    vocabulary, sentences = 2000, [10] * 10
    rules = rules_of(103, vocabulary, continues=np.zeros(vocabulary, dtype=bool))
    text, rng = 100 + np.arange(100), np.random.RandomState()
    exchanged, borders, hidden, others = [0, 0], np.zeros(9, dtype=int), [0, 0, 0], []
    for seed in range(samples):
        rng.seed(seed)
        sample = build_sample(text, sentences, 100, rules, rng)
        second = np.flatnonzero(sample["types"])[0]
        exchanged[sample["is_random"]] += 1
        borders[(102 - second if sample["is_random"] else second - 2) // 10 - 1] += 1
        chosen = np.flatnonzero(sample["loss_mask"])
        assert len(chosen) == 15  # 15% of the tokens
        now, before = sample["text"][chosen], sample["labels"][chosen]
        masked, kept = now == MASK, now == before
        hidden[0] += masked.sum()
        hidden[1] += kept.sum()
        others += now[~masked & ~kept].tolist()
    hidden[2] = len(others)
    check_shares(exchanged, [0.5, 0.5])
    check_shares(borders, [1 / 9] * 9)
    # A random token may be any of the vocabulary, including [MASK] and the original token.
    itself = 0.1 / vocabulary
    check_shares(hidden, [0.8 + itself, 0.1 + itself, 0.1 - 2 * itself])
    check_shares(np.bincount(np.array(others) // 20), [0.01] * 100)


@SAMPLES
def test_truncation(samples: int) -> None:
    rules = rules_of(83, 200, continues=np.zeros(200, dtype=bool))
    text, rng = 100 + np.arange(100), np.random.RandomState()
    lost = np.zeros((2, 11), dtype=int)
    for seed in range(samples):
        rng.seed(seed)
        sample = build_sample(text, [50, 50], 80, rules, rng)
        whole = np.where(sample["loss_mask"], sample["labels"], sample["text"])
        first, second = whole[1:41], whole[42:82]  # each loses ten tokens
        if sample["is_random"]:
            first, second = second, first
        assert (np.diff(first) == 1).all() and (np.diff(second) == 1).all() and sample["truncated"]
        lost[0, first[0] - 100] += 1
        lost[1, second[0] - 150] += 1
    binomial = [math.comb(10, k) / 2**10 for k in range(11)]
    for counts in lost:
        check_shares(counts, binomial)


@SAMPLES
def test_ngram_masking(samples: int) -> None:
    """Three of 2,000 tokens are masked, so spans do not touch: one of 3, one of 2 and one of 1, or three of 1."""
    rules = rules_of(2003, 10, mask_prob=0.0016, binary_head=False, continues=np.zeros(10, dtype=bool))
    text, rng = np.full(2000, 9), np.random.RandomState()
    spans = [0, 0, 0]
    for seed in range(samples):
        rng.seed(seed)
        positions = np.flatnonzero(build_sample(text, [2000], 2000, rules, rng)["loss_mask"])
        assert len(positions) == 3
        spans[np.sum(np.diff(positions) > 1)] += 1
    # Spans of 1, 2 and 3 words have probabilities 6/11, 3/11 and 2/11. A span longer than the tokens left is shortened.
    one, two, three = 6 / 11, 3 / 11, 2 / 11
    check_shares(spans, [three, two + one * (two + three), one * one])


# ---- whole-word masking, with transformers' tokenizer


def test_whole_words_equal_transformers(shared: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.BertTokenizer(vocab=str(shared / "data" / "bert-base-uncased-vocab.txt"))
    lines = (shared / "vectors" / "owt60.jsonl").read_text(encoding="utf-8").splitlines()[:20]
    pieces = tokenizer.get_vocab()
    continues = np.zeros(30522, dtype=bool)
    continues[[i for piece, i in pieces.items() if piece.startswith("##")]] = True
    special = {
        "cls": pieces["[CLS]"],
        "sep": pieces["[SEP]"],
        "mask": pieces["[MASK]"],
        "pad": pieces["[PAD]"],
    }
    rules = rules_of(512, 30522, binary_head=False, continues=continues, **special)
    masked_words = 0
    for seed, line in enumerate(lines):
        encoded = tokenizer(
            json.loads(line)["text"], add_special_tokens=False, truncation=True, max_length=500
        )
        words = np.array(encoded.word_ids())
        rng = np.random.RandomState(seed)
        sample = build_sample(np.array(encoded.input_ids), [len(words)], 509, rules, rng)
        chosen = sample["loss_mask"][1 : len(words) + 1]
        for word in np.unique(words):
            assert len(set(chosen[words == word])) == 1
        masked_words += len(np.unique(words[chosen == 1]))
    assert masked_words > 500


# ---- datasets


@pytest.fixture
def dataset(write_documents, tmp_path: Path) -> BertDataset:
    rng = np.random.RandomState(0)
    tokens = write_documents(
        [[rng.randint(4, VOCABULARY, size=rng.randint(1, 20)) for _ in range(n)] for n in range(20)]
    )
    rules = CutRules.of(seq_length=32, short_seq_prob=0.1, binary_head=True)
    request = IndexRequest(
        dataset=tokens, documents=range(20), split="train", samples=100, seed=5, cache=str(tmp_path / "cache")
    )
    return BertDataset(tokens, load_or_build(request, rules), rules_of(32), 5)


def equal(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> bool:
    return set(ours) == set(theirs) and all(np.array_equal(ours[name], theirs[name]) for name in ours)


def test_dataset_equals_the_reference(dataset: BertDataset) -> None:
    (rows,) = dataset.index
    for i, (start, end, target) in enumerate(rows.tolist()):
        sentences = [dataset.tokens.get(sentence).tolist() for sentence in range(start, end)]
        expected = reference(sentences, target, dataset.rules, dataset.seed + i)
        assert {name: values.tolist() for name, values in dataset[i].items()} == expected
    assert len(dataset) == len(rows) >= 100


def test_samples_depend_only_on_seed_and_index(dataset: BertDataset) -> None:
    expected = [dataset[i] for i in range(len(dataset))]
    copy = pickle.loads(pickle.dumps(dataset))  # noqa: S301, pickled here
    for i in np.random.RandomState(1).permutation(len(dataset)).tolist():
        assert equal(copy[i], expected[i])
    last = BertDataset(dataset.tokens, dataset.index, dataset.rules, 2**32 - 1)
    assert equal(last[6], BertDataset(dataset.tokens, dataset.index, dataset.rules, 0)[6]) is False
    start, end, target = next(iter(dataset.index))[6].tolist()
    sentences = [dataset.tokens.get(sentence).tolist() for sentence in range(start, end)]
    assert (
        last[6]["text"].tolist() == reference(sentences, target, dataset.rules, 5)["text"]
    )  # seeds wrap around at 2^32


def test_reading_from_several_threads(dataset: BertDataset) -> None:
    order = list(range(len(dataset))) * 5
    expected = [dataset[i] for i in order]
    with ThreadPoolExecutor(4) as threads:
        assert all(map(equal, threads.map(dataset.__getitem__, order), expected))


def test_id_outside_the_vocabulary_is_located(dataset: BertDataset) -> None:
    rules = rules_of(32, vocab_size=50)
    smaller = BertDataset(dataset.tokens, dataset.index, rules, 5)
    message = (
        r"corpus\.bin: token \d+ of sentence \d+ \(in sample \d+\) has id 5\d, but the vocabulary has 50 ids; "
        "the file was made with another tokenizer, or is damaged$"
    )
    with pytest.raises(InputError, match=message):
        for i in range(len(smaller)):
            smaller[i]


def test_empty_sentences(write_documents, tmp_path: Path) -> None:
    """Other tools may write empty sentences; they count as sentences of a sample."""
    tokens = write_documents([[[], []], [[], [5, 6], []]])
    cut = CutRules.of(seq_length=16, short_seq_prob=0, binary_head=True)
    request = IndexRequest(
        dataset=tokens, documents=range(2), split="train", samples=20, seed=1, cache=str(tmp_path)
    )
    dataset = BertDataset(tokens, load_or_build(request, cut), rules_of(16), 1)
    lengths = {int(dataset[i]["padding_mask"].sum()) for i in range(len(dataset))}
    assert lengths <= {2, 4, 5}


# ---- mock data


def test_mock_samples() -> None:
    def dataset(seed: int, vocab_size: int = 5000, **flags) -> MockBertDataset:
        config = DataConfig(seq_length=32, **flags)
        return MockBertDataset(200, config, vocab_size=vocab_size, seed=(seed, 0))

    ours = dataset(1)
    seen = set()
    for i in range(200):
        sample = ours[i]
        assert equal(sample, dataset(1)[i])
        size = sample["padding_mask"].sum()
        whole = np.where(sample["loss_mask"], sample["labels"], sample["text"])[:size]
        words = whole[whole >= 4]
        assert whole[0] == CLS and np.sum(whole == SEP) == 2 and len(words) == size - 3 >= 14
        assert whole.max() < 1004 and sample["loss_mask"].sum() >= 1
        border = np.flatnonzero(whole == SEP)[0] - 1
        if sample["is_random"]:
            words = np.concatenate([words[border:], words[:border]])
        steps = set((np.diff(words) % 1000).tolist())
        assert len(steps) == 1
        seen |= steps
    assert seen == {1, 2, 3, 4}
    assert not equal(dataset(2)[0], ours[0])
    assert not dataset(1, bert_binary_head=False)[0]["types"].any()
    assert dataset(1, vocab_size=5)[3]["text"].max() <= 4
    with pytest.raises(InputError, match=r"--mock-data: needs a vocabulary of more than 4 ids, .* has 4"):
        dataset(1, vocab_size=4)
