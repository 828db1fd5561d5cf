"""What distinguishes one kind of pretraining from another."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from megatron.tokenizer import Tokenizer
    from megatron.training.config import RunConfig

# What the loader yields: named tensors of one microbatch, the first axis the samples.
Batch = dict[str, Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """The parts of pretraining that an entry point supplies.

    A loss is a sum and a count, never a mean: how they are averaged over microbatches and replicas is decided
    in one place, `train_step` for training and `evaluate` for evaluation. There both are summed over the whole
    global batch before they are divided, so that no loss depends on how samples fall into microbatches.

    Attributes:
        name: kept in checkpoints, so that what reads one knows which model it holds.
        loss_names: one or more terms; training minimises the sum of their means.
        build_model: (config, vocab_size, padded_vocab_size) to a model without values.
        build_datasets: (config, tokenizer, samples wanted for train, validation and test) to the three
            datasets; None where nothing was wanted.
        count: batch to [terms], how many tokens or samples each term sums over.
        loss: (model, batch) to [terms], the sums, in fp32.
    """

    name: str
    loss_names: tuple[str, ...]
    build_model: Callable[[RunConfig, int, int], nn.Module]
    build_datasets: Callable[[RunConfig, Tokenizer, tuple[int, int, int]], tuple]
    count: Callable[[Batch], Tensor]
    loss: Callable[[nn.Module, Batch], Tensor]
