"""BERT datasets: samples from token files whose sequences are sentences, synthetic ones, and their batches."""

from __future__ import annotations

import collections
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
    """Batch of BERT. Sequences are as long as the longest sample needs, one for each sample.

    With --padding-free there is one sequence, in which the samples are documents, and b counts samples only in
    `is_random` and `pair_mask`. Positions are those in the sequence. Padding at its end is a document of its own.

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
        position_ids: int64 [1, seq], with --padding-free positions in the sample.
        first_tokens: int64 [1, samples], with --padding-free positions of the samples' first tokens.
    """

    tokentype_ids: Tensor = sequence_field(dim=1)
    padding_mask: Tensor | None = sequence_field(dim=1, default=None)
    positions: Tensor
    labels: Tensor
    loss_mask: Tensor
    is_random: Tensor
    pair_mask: Tensor | None = None
    position_ids: Tensor | None = sequence_field(dim=1, default=None)
    first_tokens: Tensor | None = None

    def work(self, num_logits: int) -> dict[tuple[int, int], int]:
        """Number of sequences by length and number of positions that are projected to the vocabulary; of documents
        with --padding-free, and all projected positions apart."""
        if self.document_ids is None:
            return super().work(num_logits)
        lengths = self.document_ids.unique_consecutive(return_counts=True)[1].tolist()
        return {(0, num_logits): 1, **collections.Counter((length, 0) for length in lengths)}

    def divide(self, rank: int, size: int) -> BertBatch:
        """Return a rank's positions of every sequence, and the predictions at these."""
        zigzag = Zigzag.of(self.seq_length, size, documents=self.document_ids is not None)
        rows = torch.arange(self.seq_length // size)
        row_of = torch.full((self.seq_length,), -1)  # -1 for the positions of other ranks
        row_of[zigzag.positions(rank, rows)] = rows
        at, local = self.positions, row_of[self.positions]
        is_here = (local >= 0) & (self.loss_mask > 0)
        # One at least, as the heads compute on some rows.
        count = min(max(int(is_here.sum(1).max()), 1), at.shape[1]) if len(at) else 0
        order = is_here.int().argsort(dim=1, descending=True, stable=True)[:, :count]
        here = is_here.gather(1, order)
        first = self.first_tokens
        first_local = row_of[torch.zeros_like(self.is_random) if first is None else first].view(-1)
        return dataclasses.replace(
            super().divide(rank, size),
            positions=local.gather(1, order) * here,
            labels=self.labels.gather(1, order) * here,
            loss_mask=self.loss_mask.gather(1, order) * here,
            pair_mask=(first_local >= 0).to(self.loss_mask.dtype),
            first_tokens=None if first is None else first_local.clamp(min=0).unsqueeze(0),
        )


class BertSamples:
    """Base class of BERT datasets.

    Attributes:
        rules: for the maximum sequence length.
        length_multiple: a batch is as long as its longest sample, or with `padding_free` as all samples together,
            rounded up to a multiple of this.
        padding_free: lay the samples of a batch end to end.
    """

    def __init__(self, rules: SampleRules, length_multiple: int, *, padding_free: bool = False) -> None:
        self.rules, self.length_multiple, self.padding_free = rules, length_multiple, padding_free

    def collate(self, samples: Sequence[dict[str, np.ndarray]]) -> BertBatch:
        """Make a batch of samples."""
        return self._packed(samples) if self.padding_free else self._padded(samples)

    def _packed(self, samples: Sequence[dict[str, np.ndarray]]) -> BertBatch:
        lengths = np.array([sample["padding_mask"].sum() for sample in samples], dtype=np.int64)
        ends = lengths.cumsum()
        used = int(lengths.sum())
        shape = 1, max(-(-used // self.length_multiple), 1) * self.length_multiple
        first = ends - lengths
        fields: dict[str, np.ndarray] = {
            "tokens": np.full(shape, self.rules.pad, dtype=np.int64),
            "tokentype_ids": np.zeros(shape, dtype=np.int64),
            "position_ids": np.zeros(shape, dtype=np.int64),
            "document_ids": np.full(shape, len(samples), dtype=np.int64),
            "first_tokens": first[None],
            "is_random": np.array([sample["is_random"] for sample in samples], dtype=np.int64),
        }
        fields["position_ids"][0, :used] = np.arange(used) - np.repeat(first, lengths)
        fields["document_ids"][0, :used] = np.repeat(np.arange(len(samples)), lengths)
        whole = {
            key: np.concatenate(
                [s[key][:n] for s, n in zip(samples, lengths, strict=True)] or [np.zeros(0, np.int64)]
            )
            for key in ("text", "types", "labels", "loss_mask")
        }
        fields["tokens"][0, :used], fields["tokentype_ids"][0, :used] = whole["text"], whole["types"]
        fields["positions"] = np.flatnonzero(whole["loss_mask"])[None]
        fields["labels"] = whole["labels"][fields["positions"]]
        fields["loss_mask"] = np.ones(fields["positions"].shape, dtype=np.float32)
        return BertBatch.from_arrays(fields)

    def _padded(self, samples: Sequence[dict[str, np.ndarray]]) -> BertBatch:
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
        padding_free: bool = False,
    ) -> None:
        super().__init__(rules, length_multiple, padding_free=padding_free)
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
    ) -> tuple[type[BertDataset], tuple[IndexedDataset, MappedArrays, SampleRules, int, int, bool]]:
        how = self.length_multiple, self.padding_free
        return BertDataset, (self.tokens, self.index, self.rules, self.seed, *how)

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
        how = self.length_multiple, config.padding_free
        return BertDataset(request.dataset, index, rules, self.seed, *how)


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
