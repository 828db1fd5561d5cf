"""GPT batches, and the dataset of fixed-length samples that are cut from a stream of documents."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from torch import Tensor

from megatron.data.batch import Batch, sequence_field
from megatron.data.build import build_datasets
from megatron.data.config import DataConfig
from megatron.data.dataset import Dataset
from megatron.data.gpt_index import load_or_build
from megatron.data.index_cache import IndexRequest, MappedArrays
from megatron.data.indexed import IndexedDataset
from megatron.errors import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTBatch(Batch):
    """Batch of a causal language model.

    Attributes:
        tokens: int64 [batch, seq].
        labels: int64 [batch, seq], the next token at each position.
        loss_mask: float32 [batch, seq], weight of each prediction. With --eod-mask-loss it is 0 where the input is an
            end-of-document token.
        position_ids: int64 [batch, seq]. With --reset-position-ids they restart at 0 in each document.
    """

    labels: Tensor = sequence_field(dim=1)
    loss_mask: Tensor = sequence_field(dim=1)
    position_ids: Tensor = sequence_field(dim=1)


def ltor_batch(
    text: np.ndarray, eod: int | None, config: DataConfig, starts: np.ndarray | None = None
) -> GPTBatch:
    """Make a batch from token ids, int64 [batch, seq + 1].

    An end-of-document token belongs to the document that it ends.

    Args:
        eod: id of the end-of-document token; may be None if no flag of `config` needs it.
        config: for --reset-position-ids, --reset-attention-mask and --eod-mask-loss.
        starts: bool [batch, seq], true where a document starts without such a token before it.
    """
    tokens, labels = np.ascontiguousarray(text[:, :-1]), np.ascontiguousarray(text[:, 1:])
    positions = np.tile(np.arange(tokens.shape[1]), (len(tokens), 1))
    ends = np.zeros(tokens.shape, dtype=bool) if eod is None else tokens == eod
    starts = np.zeros_like(ends) if starts is None else starts.copy()
    starts[:, 1:] |= ends[:, :-1]

    fields = {"tokens": tokens, "labels": labels, "loss_mask": np.ones(tokens.shape, dtype=np.float32)}
    if config.eod_mask_loss:
        fields["loss_mask"][ends] = 0.0
    if config.reset_position_ids:
        positions = positions - np.maximum.accumulate(np.where(starts, positions, 0), axis=1)
    fields["position_ids"] = positions
    if config.reset_attention_mask:
        fields["document_ids"] = np.cumsum(starts, axis=1)
    return GPTBatch.from_arrays(fields)


@dataclasses.dataclass(kw_only=True)
class GPTSamples:
    """Base class of GPT datasets.

    Attributes:
        config: for --seq-length and the flags that `ltor_batch` reads.
        vocab_size: token ids are below it.
        eod: as for `ltor_batch`.
    """

    config: DataConfig
    vocab_size: int
    eod: int | None = None

    def collate(self, samples: Sequence[dict[str, np.ndarray]]) -> GPTBatch:
        """Make a batch of samples."""
        text = np.empty((len(samples), self.config.seq_length + 1), dtype=np.int64)
        for row, sample in zip(text, samples, strict=True):
            row[:] = sample["text"]
        return ltor_batch(text, self.eod, self.config)


@dataclasses.dataclass(kw_only=True)
class GPTDataset(GPTSamples):
    """Samples of seq_length + 1 tokens, as the three arrays of `megatron.data.gpt_index` in `index` define them."""

    tokens: IndexedDataset
    index: MappedArrays

    def __len__(self) -> int:
        *_, order = self.index
        return len(order)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """Return sample `i`: {"text": int64 [seq_length + 1]}.

        Raises:
            InputError: a token id is not in the vocabulary.
        """
        text = np.concatenate([self.tokens.get(*span) for span in self._spans(i)]).astype(np.int64)
        if text.min() < 0 or text.max() >= self.vocab_size:
            raise self.tokens.out_of_vocabulary(self._spans(i), "document", i, self.vocab_size)
        return {"text": text}

    def _spans(self, i: int) -> Iterator[tuple[int, int, int]]:
        """Yield (sequence, offset, length) for each part of a document in sample `i`."""
        documents, starts, order = self.index
        start = int(order[i])
        (first, offset), (last, end) = starts[start : start + 2].tolist()
        for position in range(first, last + 1):
            sequence = int(documents[position])
            stop = end + 1 if position == last else int(self.tokens.sizes[sequence])
            yield sequence, offset, stop - offset
            offset = 0


@dataclasses.dataclass
class GPTDatasetBuilder:
    """Builder of GPT datasets. Every sequence of a token file is a document."""

    config: DataConfig
    seed: int
    vocab_size: int
    eod: int | None

    def num_documents(self, file: IndexedDataset) -> int:
        return len(file)

    def num_tokens(self, file: IndexedDataset, documents: range) -> int:
        return int(file.sizes[documents.start : documents.stop].sum(dtype=np.int64))

    def build(self, request: IndexRequest) -> GPTDataset:
        dataset_type, load_index = PACKINGS[self.config.packing]
        index = load_index(request, self.config.seq_length)
        return dataset_type(
            config=self.config,
            vocab_size=self.vocab_size,
            eod=self.eod,
            tokens=request.dataset,
            index=index,
        )


# Class of the samples, and the function that loads their index or builds it, by --packing. `megatron.plugins` adds to
# them.
PACKINGS: dict[str, tuple[type[GPTDataset], Callable[[IndexRequest, int], MappedArrays]]] = {
    "concatenated": (GPTDataset, load_or_build)
}


def build_gpt_datasets(
    config: DataConfig,
    *,
    samples: tuple[int, int, int],
    seed: int,
    vocab_size: int,
    eod: int | None = None,
) -> dict[str, Dataset]:
    """Build the GPT datasets by name, like `build_datasets`.

    Args:
        samples: minimum number of samples for training, validation and testing.
        seed: random seed of the sample order.
        vocab_size: size of the vocabulary; token ids are below it.
        eod: id of the end-of-document token; None if the tokenizer has none.
    """
    config.require("seq_length")
    if config.needs_eod and eod is None:
        raise InputError(
            "--reset-position-ids, --reset-attention-mask and --eod-mask-loss need a tokenizer with an "
            "end-of-document token; this one has none"
        )
    if config.bert_flags_given:
        raise InputError(f"{config.bert_flags_given[0]}: applies to BERT, not to GPT; leave it out")
    return build_datasets(GPTDatasetBuilder(config, seed, vocab_size, eod), samples)
