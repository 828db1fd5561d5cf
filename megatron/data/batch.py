"""Batches: frozen dataclasses of tensors whose fields declare their sequence dimension."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from megatron.data.zigzag import Zigzag

BatchT = TypeVar("BatchT", bound="Batch")


def sequence_field(dim: int, **options: Any) -> Any:
    """Declare a field with one entry per position of the sequence along `dim`."""
    return dataclasses.field(metadata={"sequence_dim": dim}, **options)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """Base class of a task's batch. Fields are tensors; an optional one may be None.

    Attributes:
        tokens: int64 [sequences, seq], token ids.
        document_ids: int64 [sequences, seq], with --reset-attention-mask and --padding-free: number of documents that
            end before each token. A token attends to tokens of its own document only.
        loss_grad: fp32 [terms], in training the gradient of each of the losses' sums: loss scale over denominator.
        sequence_grad: fp32 scalar, in training that of losses which are a mean over sequences: loss scale over their
            number in the global batch.
    """

    tokens: Tensor = sequence_field(dim=1)
    document_ids: Tensor | None = sequence_field(dim=1, default=None)
    loss_grad: Tensor | None = None
    sequence_grad: Tensor | None = None

    @property
    def num_sequences(self) -> int:
        return self.tokens.shape[0]

    @property
    def seq_length(self) -> int:
        return self.tokens.shape[1]

    def work(self, num_logits: int) -> dict[tuple[int, int], int]:
        """Number of sequences by length and number of positions that are projected to the vocabulary."""
        return {(self.seq_length, num_logits): self.num_sequences}

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and tensor of each field that is not None."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None:
                yield field.name, value

    def map(self: BatchT, function: Callable[[Tensor], Tensor]) -> BatchT:
        """Return the batch with `function` applied to each tensor."""
        return type(self)(**{name: function(tensor) for name, tensor in self.items()})

    def divide(self: BatchT, rank: int, size: int) -> BatchT:
        """Return the part of a rank of context parallelism: its positions of every sequence."""
        dims = {field.name: field.metadata.get("sequence_dim") for field in dataclasses.fields(self)}
        zigzag = Zigzag.of(self.seq_length, size, documents=self.document_ids is not None)
        parts = {n: zigzag.shard(x, dim, rank) for n, x in self.items() if (dim := dims[n]) is not None}
        return dataclasses.replace(self, **parts)

    def to(self: BatchT, device: torch.device, *, non_blocking: bool = False) -> BatchT:
        """Copy the tensors to a device. From pinned memory, `non_blocking` does not block the host."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self: BatchT) -> BatchT:
        """Copy the tensors to pinned memory."""
        return self.map(Tensor.pin_memory)

    @classmethod
    def from_arrays(cls: type[BatchT], arrays: dict[str, np.ndarray]) -> BatchT:
        """Make a batch of arrays by field name, sharing their memory."""
        return cls(**{name: torch.from_numpy(array) for name, array in arrays.items()})

    def __reduce__(self) -> tuple[Any, ...]:
        # A worker would send a tensor as a file descriptor of shared memory, which is several times slower than the
        # bytes of an array (GPT, 8 x 1,024 tokens).
        return self.from_arrays, ({name: tensor.numpy() for name, tensor in self.items()},)
