"""From the data flags to the training, validation and test data sets."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import os
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from megatron.data.bert_dataset import BertDataset, MockBertDataset, SampleRules
from megatron.data.bert_index import SPECIAL_TOKENS, CutRules
from megatron.data.bert_index import load_or_build as load_or_build_map
from megatron.data.blend import BlendedDataset, load_or_build_order, parse_blend
from megatron.data.config import DataConfig
from megatron.data.gpt_dataset import GPTDataset, MockDataset
from megatron.data.gpt_index import load_or_build
from megatron.data.indexed import IndexedDataset
from megatron.data.split import DEFAULT_SPLIT, parse_split, split_bounds
from megatron.flags import InputError
from megatron.tokenizer import Tokenizer

logger = logging.getLogger("megatron")

Dataset: TypeAlias = GPTDataset | MockDataset | BertDataset | MockBertDataset | BlendedDataset
NAMES = ("train", "valid", "test")
# Each data set of a blend is asked for this many times its share, as Megatron-LM does; how many epochs that
# takes, and so the order of its samples, depends on it.
SURPLUS = 1.005


def by_name(datasets: tuple[Dataset | None, Dataset | None, Dataset | None]) -> dict[str, Dataset]:
    """Those of the training, validation and test data sets that there are."""
    named = zip(("train", "validation", "test"), datasets, strict=True)
    return {name: dataset for name, dataset in named if dataset is not None}


@dataclasses.dataclass(frozen=True)
class Part:
    """The data of one part: train, valid or test.

    Attributes:
        name: which part.
        reason: what decided which documents are in it, for messages.
        datasets: the data sets it draws from.
        documents: which documents of each.
        weights: how often it draws from each; None is by their sizes.
    """

    name: str
    reason: str
    datasets: list[IndexedDataset]
    documents: list[range]
    weights: list[float] | None


def build_gpt_datasets(
    config: DataConfig,
    *,
    samples: tuple[int, int, int],
    seed: int,
    vocab_size: int,
    eod: int | None = None,
) -> tuple[Dataset | None, Dataset | None, Dataset | None]:
    """The training, validation and test data sets that the flags describe.

    Args:
        samples: how many samples of each are wanted at least. Where it is 0, or the user gave validation or
            testing no data (a share of 0 in --split, or no path), the data set is None.
        seed: of the order of the samples.
        vocab_size: token ids are below this.
        eod: id of the end-of-document token; None if the tokenizer has none.

    Raises:
        InputError: a file is missing or damaged, a flag is wrong, or there are too few documents.
    """
    config.require("seq_length")
    if config.needs_eod and eod is None:
        raise InputError(
            "--reset-position-ids, --reset-attention-mask and --eod-mask-loss need a tokenizer with an "
            "end-of-document token; this one has none"
        )
    if config.given_of_bert:
        raise InputError(
            f"{config.given_of_bert[0]}: is about the samples of BERT, and this is GPT; leave it out"
        )
    return _build_datasets(GPTMaker(config, seed, vocab_size), samples)


def build_bert_datasets(
    config: DataConfig,
    *,
    samples: tuple[int, int, int],
    seed: int,
    tokenizer: Tokenizer,
    length_multiple: int = 8,
) -> tuple[Dataset | None, Dataset | None, Dataset | None]:
    """The training, validation and test data sets that the flags describe.

    Args:
        samples: as of `build_gpt_datasets`.
        seed: of the choice and the order of the samples, and of what chance decides within each.
        tokenizer: the one that the token files were made with; with --mock-data any.
        length_multiple: batches are padded to a multiple of this, or to --seq-length.

    Raises:
        InputError: a file is missing or damaged, a flag or the tokenizer is wrong, or there are too few documents.
    """
    config.require("seq_length")
    if config.needs_eod:
        raise InputError(
            "--reset-position-ids, --reset-attention-mask and --eod-mask-loss are about the samples of GPT, which run "
            "over the ends of documents, and this is BERT; leave them out"
        )
    if config.data_order != "v2.5":
        raise InputError(
            f"--data-order: {config.data_order} is an order of GPT's samples, and this is BERT; leave it out"
        )
    least = SPECIAL_TOKENS + max(2, math.ceil(1 / config.mask_prob))
    if config.seq_length < least:
        raise InputError(
            f"--seq-length: {config.seq_length} leaves BERT nothing to guess, at --mask-prob {config.mask_prob} and "
            f"with {SPECIAL_TOKENS} special tokens; it must be at least {least}"
        )
    return _build_datasets(BertMaker(config, seed, tokenizer, length_multiple), samples)


class GPTMaker:
    """Makes data sets of GPT from token files, of which every sequence counts as a document."""

    def __init__(self, config: DataConfig, seed: int, vocab_size: int) -> None:
        self.config = config
        self.seed = seed
        self.vocab_size = vocab_size

    def count(self, dataset: IndexedDataset) -> int:
        """Documents in a file."""
        return len(dataset)

    def tokens(self, dataset: IndexedDataset, documents: range) -> int:
        """Tokens in some documents of a file."""
        return int(dataset.sizes[documents.start : documents.stop].sum(dtype=np.int64))

    def make(self, dataset: IndexedDataset, documents: range, name: str, samples: int) -> GPTDataset:
        """At least so many samples of documents of a file; `name` says what for."""
        index = load_or_build(
            dataset,
            documents,
            name=name,
            seq_length=self.config.seq_length,
            samples=samples,
            seed=self.seed,
            cache=_cache_folder(self.config, dataset),
        )
        return GPTDataset(dataset, index, self.vocab_size)

    def mock(self, samples: int, part: int) -> MockDataset:
        """Synthetic samples of one part of the data."""
        return MockDataset(
            samples,
            seq_length=self.config.seq_length,
            vocab_size=self.vocab_size,
            seed=(self.seed, part),
        )


class BertMaker:
    """Makes data sets of BERT from token files, of which every sequence is a sentence; as `GPTMaker`."""

    def __init__(self, config: DataConfig, seed: int, tokenizer: Tokenizer, length_multiple: int) -> None:
        self.config = config
        self.seed = seed
        self.length_multiple = length_multiple
        self.vocab_size = tokenizer.vocab_size
        self.cut_rules = CutRules.of(
            seq_length=config.seq_length,
            short_seq_prob=config.short_seq_prob,
            binary_head=config.bert_binary_head,
        )
        self.sample_rules = None if config.mock_data else SampleRules.of(config, tokenizer)

    def count(self, dataset: IndexedDataset) -> int:
        return len(dataset.doc_idx) - 1

    def tokens(self, dataset: IndexedDataset, documents: range) -> int:
        first, stop = dataset.doc_idx[documents.start], dataset.doc_idx[documents.stop]
        return int(dataset.sizes[first:stop].sum(dtype=np.int64))

    def make(self, dataset: IndexedDataset, documents: range, name: str, samples: int) -> BertDataset:
        index = load_or_build_map(
            dataset,
            documents,
            self.cut_rules,
            name=name,
            samples=samples,
            seed=self.seed,
            cache=_cache_folder(self.config, dataset),
        )
        return BertDataset(dataset, index, self.sample_rules, self.seed, self.length_multiple)

    def mock(self, samples: int, part: int) -> MockBertDataset:
        return MockBertDataset(
            samples,
            self.config,
            vocab_size=self.vocab_size,
            seed=(self.seed, part),
            length_multiple=self.length_multiple,
        )


def _build_datasets(
    maker: GPTMaker | BertMaker, samples: tuple[int, int, int]
) -> tuple[Dataset | None, Dataset | None, Dataset | None]:
    config = maker.config
    if config.mock_data:
        train, valid, test = (maker.mock(n, part) if n > 0 else None for part, n in enumerate(samples))
        return train, valid, test
    parts = _parts(maker)
    if parts[0] is None and samples[0] > 0:
        if config.data_path is not None:
            raise InputError(
                f"--split: {config.split} leaves no documents to train on; its first share must be above 0"
            )
        raise InputError("no data to train on: give --data-path, --train-data-path or --mock-data")
    datasets: list[Dataset | None] = []
    for name, part, count in zip(NAMES, parts, samples, strict=True):
        if part is None and count > 0:
            logger.info(f"no {name} data: {_why_none(config, name)}, so there will be no {name} loss")
        datasets.append(None if part is None or count == 0 else _build(part, maker, count))
    train, valid, test = datasets
    return train, valid, test


def _why_none(config: DataConfig, name: str) -> str:
    if config.data_path is None:
        return f"--{name}-data-path is not given"
    return f"--split {config.split or f'{DEFAULT_SPLIT} (the default)'} gives it no documents"


def _parts(maker: GPTMaker | BertMaker) -> list[Part | None]:
    """What the flags give to train, valid and test."""
    config = maker.config
    if config.data_path is not None:
        prefixes, weights = parse_blend(config.data_path, "--data-path")
        datasets = [IndexedDataset(prefix) for prefix in prefixes]
        split = config.split or DEFAULT_SPLIT
        shares = parse_split(split)
        bounds = [split_bounds(shares, maker.count(dataset), config.data_order) for dataset in datasets]
        parts: list[Part | None] = []
        for i, name in enumerate(NAMES):
            documents = [range(b[i], b[i + 1]) for b in bounds]
            # The default split may leave a small data set nothing to test on; a split that was given may not.
            wanted = shares[i] > 0 and (i == 0 or config.split is not None or any(documents))
            parts.append(Part(name, f"--split {split}", datasets, documents, weights) if wanted else None)
        return parts
    parts = []
    paths = (config.train_data_path, config.valid_data_path, config.test_data_path)
    for name, values in zip(NAMES, paths, strict=True):
        if values is None:
            parts.append(None)
            continue
        flag = f"--{name}-data-path"
        prefixes, weights = parse_blend(values, flag)
        datasets = [IndexedDataset(prefix) for prefix in prefixes]
        documents = [range(maker.count(dataset)) for dataset in datasets]
        # Megatron-LM passes over the weight of a single prefix here, but not in --data-path.
        parts.append(Part(name, flag, datasets, documents, weights if len(prefixes) > 1 else None))
    return parts


def _build(part: Part, maker: GPTMaker | BertMaker, samples: int) -> Dataset:
    """The data set of one part, blended if it draws from several."""
    tokens = [
        maker.tokens(dataset, documents)
        for dataset, documents in zip(part.datasets, part.documents, strict=True)
    ]
    order = maker.config.data_order
    read_once = part.weights is None and len(tokens) > 1 and order == "head"
    if read_once:
        weights = [max(0, count - 1) // maker.config.seq_length for count in tokens]
    else:
        weights = tokens if part.weights is None else part.weights
    drawn = [i for i, weight in enumerate(weights) if weight > 0]
    for i in drawn or [0]:
        if tokens[i] == 0:
            raise InputError(
                f"{part.reason}: gives '{part.name}' {len(part.documents[i]):,} of the "
                f"{maker.count(part.datasets[i]):,} documents of {part.datasets[i].prefix}, with 0 tokens, but "
                f"{samples:,} samples of it are wanted; give it more documents, or none (a share of 0, or no path)"
            )
    if read_once and sum(weights) < samples:
        raise InputError(
            f"{part.reason}: a blend without weights is read once by --data-order head, which gives {sum(weights):,} "
            f"samples, but {samples:,} of '{part.name}' are wanted; give weights, or --data-order v2.5"
        )
    shares = _shares([weights[i] for i in drawn], order)
    if read_once:
        counts = [weights[i] for i in drawn]
    elif part.weights is None and len(drawn) == 1:
        counts = [samples]
    else:
        counts = [_with_surplus(samples, share, order) for share in shares]
    datasets = [
        maker.make(part.datasets[i], part.documents[i], part.name, count)
        for i, count in zip(drawn, counts, strict=True)
    ]
    if len(datasets) == 1:
        return datasets[0]
    cache = _cache_folder(maker.config, part.datasets[drawn[0]])
    return BlendedDataset(datasets, load_or_build_order(shares, samples, name=part.name, cache=cache))


def _shares(weights: Sequence[float], order: str) -> list[float]:
    """Weights divided by their sum, which is taken as Megatron-LM takes it: the last bit decides what is rounded up."""
    *_, one_by_one = itertools.accumulate(weights)
    total = float(np.sum(weights, dtype=np.float64)) if order == "head" else one_by_one
    return [weight / total for weight in weights]


def _with_surplus(samples: int, share: float, order: str) -> int:
    """How many samples a data set of a blend is asked for."""
    return math.ceil((math.ceil(samples * share) if order == "head" else samples * share) * SURPLUS)


def _cache_folder(config: DataConfig, dataset: IndexedDataset) -> str:
    return config.data_cache_path or os.path.join(os.path.dirname(dataset.prefix), "index-cache")
