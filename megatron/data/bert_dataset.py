"""BERT datasets: samples from token files whose sequences are sentences, synthetic ones, and their batches."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megatron.data.batch import Batch, sequence_field
from megatron.data.bert_index import SPECIAL_TOKENS, CutRules, load_or_build
from megatron.data.bert_samples import SampleRules, build_sample
from megatron.data.build import build_datasets
from megatron.data.config import DataConfig
from megatron.data.dataset import Dataset
from megatron.data.index_cache import IndexRequest, MappedArrays
from megatron.data.indexed import IndexedDataset
from megatron.data.zigzag import Zigzag
from megatron.errors import InputError
from megatron.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class BertBatch(Batch):
    """Batch of BERT. Sequences are as long as the longest sample needs.

    Attributes:
        tokens: int64 [batch, seq], with masked words.
        tokentype_ids: int64 [batch, seq], 1 for the second segment, otherwise 0.
        padding_mask: int64 [batch, seq], 0 on padding; None without padding.
        positions: int64 [batch, predictions], positions to predict; 0 where a sample has fewer.
        labels: int64 [batch, predictions], original tokens at `positions`.
        loss_mask: float32 [batch, predictions], 0 where a sample has fewer predictions, otherwise 1.
        is_random: int64 [batch], 1 if the segments were swapped.
        pair_mask: float32 [batch], with context parallelism 1 on the rank of the first token, from which the order of
            segments is predicted, and 0 on others.
    """

    tokentype_ids: Tensor = sequence_field(dim=1)
    padding_mask: Tensor | None = sequence_field(dim=1, default=None)
    positions: Tensor
    labels: Tensor
    loss_mask: Tensor
    is_random: Tensor
    pair_mask: Tensor | None = None

    def divide(self, rank: int, size: int) -> BertBatch:
        """Return a rank's positions of every sequence, and the predictions at these."""
        first, second = Zigzag(self.seq_length, size).ranges(rank)
        at, half = self.positions, first[1] - first[0]
        in_first, in_second = ((at >= begin) & (at < end) for begin, end in (first, second))
        local = torch.where(in_first, at - first[0], at - second[0] + half)
        is_here = (in_first | in_second) & (self.loss_mask > 0)
        # One at least, as the heads compute on some rows.
        count = min(max(int(is_here.sum(1).max()), 1), at.shape[1]) if len(at) else 0
        order = is_here.int().argsort(dim=1, descending=True, stable=True)[:, :count]
        here = is_here.gather(1, order)
        return dataclasses.replace(
            super().divide(rank, size),
            positions=local.gather(1, order) * here,
            labels=self.labels.gather(1, order) * here,
            loss_mask=self.loss_mask.gather(1, order) * here,
            pair_mask=self.loss_mask.new_full((len(at),), rank == 0),
        )


class BertSamples:
    """Base class of BERT datasets.

    Attributes:
        rules: for the maximum sequence length.
        length_multiple: a batch is as long as its longest sample, rounded up to a multiple of this.
    """

    def __init__(self, rules: SampleRules, length_multiple: int) -> None:
        self.rules, self.length_multiple = rules, length_multiple

    def collate(self, samples: Sequence[dict[str, np.ndarray]]) -> BertBatch:
        """Make a batch of samples."""
        longest = max((int(sample["padding_mask"].sum()) for sample in samples), default=1)
        length = min(-(-longest // self.length_multiple) * self.length_multiple, self.rules.seq_length)

        predicted = [np.flatnonzero(sample["loss_mask"]) for sample in samples]
        shape = len(samples), max(map(len, predicted), default=0)
        fields: dict[str, np.ndarray] = {
            "positions": np.zeros(shape, dtype=np.int64),
            "labels": np.zeros(shape, dtype=np.int64),
            "loss_mask": np.zeros(shape, dtype=np.float32),
            "is_random": np.array([sample["is_random"] for sample in samples], dtype=np.int64),
        }
        for i, (sample, at) in enumerate(zip(samples, predicted, strict=True)):
            fields["positions"][i, : len(at)] = at
            fields["labels"][i, : len(at)] = sample["labels"][at]
            fields["loss_mask"][i, : len(at)] = 1
        for name, key in (("tokens", "text"), ("tokentype_ids", "types"), ("padding_mask", "padding_mask")):
            rows = [sample[key][:length] for sample in samples]
            fields[name] = np.stack(rows) if rows else np.zeros((0, length), dtype=np.int64)
        if fields["padding_mask"].all():
            del fields["padding_mask"]
        return BertBatch.from_arrays(fields)


class BertDataset(BertSamples):
    """Samples of a sentence map (`megatron.data.bert_index`).

    A sample depends only on the data, the seed and its index.

    Pickles as paths, so a worker process maps the files itself.
    """

    def __init__(
        self,
        tokens: IndexedDataset,
        index: MappedArrays,
        rules: SampleRules,
        seed: int,
        length_multiple: int = 8,
    ) -> None:
        super().__init__(rules, length_multiple)
        self.tokens = tokens
        self.index = index
        self.seed = seed
        (self._map,) = index
        # Creating a generator takes a hundred times as long as seeding one, but threads cannot share it.
        self._rng, self._lock = np.random.RandomState(), threading.Lock()

    def __len__(self) -> int:
        return len(self._map)

    def __reduce__(
        self,
    ) -> tuple[type[BertDataset], tuple[IndexedDataset, MappedArrays, SampleRules, int, int]]:
        return BertDataset, (self.tokens, self.index, self.rules, self.seed, self.length_multiple)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """Return sample `i`, from `build_sample`.

        Raises:
            InputError: a token id is not in the vocabulary.
        """
        start, end, target = self._map[i].tolist()
        sentences = [self.tokens.get(sentence) for sentence in range(start, end)]
        text = np.concatenate(sentences).astype(np.int64)
        if len(text) and (text.min() < 0 or text.max() >= self.rules.vocab_size):
            spans = ((sentence, 0, int(self.tokens.sizes[sentence])) for sentence in range(start, end))
            raise self.tokens.out_of_vocabulary(spans, "sentence", i, self.rules.vocab_size)
        with self._lock:
            self._rng.seed((self.seed + i) % 2**32)
            return build_sample(text, [len(s) for s in sentences], target, self.rules, self._rng)


@dataclasses.dataclass
class BertDatasetBuilder:
    """Builder of BERT datasets. Every sequence of a token file is a sentence."""

    config: DataConfig
    seed: int
    tokenizer: Tokenizer
    length_multiple: int

    def num_documents(self, file: IndexedDataset) -> int:
        return len(file.doc_idx) - 1

    def num_tokens(self, file: IndexedDataset, documents: range) -> int:
        first, stop = file.doc_idx[documents.start], file.doc_idx[documents.stop]
        return int(file.sizes[first:stop].sum(dtype=np.int64))

    def build(self, request: IndexRequest) -> BertDataset:
        config = self.config
        cut_rules = CutRules.of(
            seq_length=config.seq_length,
            short_seq_prob=config.short_seq_prob,
            binary_head=config.bert_binary_head,
        )
        rules = SampleRules.of(config, self.tokenizer)
        index = load_or_build(request, cut_rules)
        return BertDataset(request.dataset, index, rules, self.seed, self.length_multiple)


def build_bert_datasets(
    config: DataConfig,
    *,
    samples: tuple[int, int, int],
    seed: int,
    tokenizer: Tokenizer,
    length_multiple: int = 8,
) -> dict[str, Dataset]:
    """Build the BERT datasets by name, as `build_datasets`.

    Args:
        samples: minimum number of samples for training, validation and testing.
        seed: random seed of the choice, order and masking of the samples.
        tokenizer: the tokenizer of the token files; any with --mock-data.
        length_multiple: batches are padded to a multiple of this, or to --seq-length.
    """
    config.require("seq_length")
    if config.needs_eod:
        raise InputError(
            "--reset-position-ids, --reset-attention-mask and --eod-mask-loss apply to GPT, whose samples span "
            "documents, not to BERT; leave them out"
        )
    if config.data_order != "v2.5":
        raise InputError(f"--data-order: {config.data_order} applies to GPT, not to BERT; leave it out")
    if config.packing != "concatenated":
        raise InputError(f"--packing: {config.packing} applies to GPT, not to BERT; leave it out")
    least = SPECIAL_TOKENS + max(2, math.ceil(1 / config.mask_prob))
    if config.seq_length < least:
        raise InputError(
            f"--seq-length: {config.seq_length} leaves BERT no token to predict with --mask-prob {config.mask_prob} "
            f"and {SPECIAL_TOKENS} special tokens; it must be at least {least}"
        )
    return build_datasets(BertDatasetBuilder(config, seed, tokenizer, length_multiple), samples)
