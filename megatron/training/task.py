"""What distinguishes one kind of pretraining from another."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.utils.data import Dataset

from megatron.model.layers import TensorParallel
from megatron.parallel.random import DropoutKey
from megatron.parallel.recompute import Recompute
from megatron.parallel.stages import Chunk

if TYPE_CHECKING:
    from megatron.data.loader import Batch
    from megatron.tokenizer import Tokenizer
    from megatron.training.config import RunConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """Which part of the model a module is to hold, and how its layers are divided and recomputed."""

    vocab_size: int
    padded_vocab_size: int
    chunk: Chunk
    tp: TensorParallel
    recompute: Recompute


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measure:
    """What is evaluated of a model, each a sum and a count, such as of right answers: `count` and `forward` are as
    those of `Task`."""

    names: tuple[str, ...]
    count: Callable[[Batch], Tensor]
    forward: Callable[[nn.Module, Batch, Tensor | None, DropoutKey], Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Relation:
    """What a model shares with others, which it may begin with the weights of.

    Attributes:
        tasks: names of the tasks that the others are of.
        new: beginnings of the names of weights that this model may have and another lack. They begin at random.
        dropped: of those that another may have and this model lacks.
    """

    tasks: tuple[str, ...]
    new: tuple[str, ...]
    dropped: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """The parts of pretraining that an entry point supplies.

    A loss is a sum and a count, never a mean: how they are averaged over microbatches and replicas is decided
    in one place, `Engine`. There both are summed over the whole global batch before they are divided, so that no
    loss depends on how samples fall into microbatches.

    Attributes:
        name: kept in checkpoints, so that what reads one knows which model it holds.
        loss_names: one or more terms; training minimises the sum of their means.
        build_model: (config, part) to a module without values.
        build_datasets: (config, tokenizer, samples wanted for train, validation and test) to the datasets by name:
            "train", and those to evaluate on.
        count: batch to [terms], how many tokens or samples each term sums over.
        vocab_positions: batch to how many positions of a sample are projected to the vocabulary.
        forward: (chunk of the model, batch, what the chunk before gave or None, dropout key) to what the next
            chunk takes; for the last chunk [terms], the sums of the losses, in fp32.
        measure: what is evaluated, where that is not its losses.
        begins_with: whose weights it may begin with beside its own, and which of them (--finetune).
        causal: whether a position attends to none after it, which halves the work of attention.
        is_static: whether all batches of training have the same shapes, as --cuda-graph needs.
    """

    name: str
    loss_names: tuple[str, ...]
    build_model: Callable[[RunConfig, Part], nn.Module]
    build_datasets: Callable[[RunConfig, Tokenizer, tuple[int, int, int]], dict[str, Dataset]]
    count: Callable[[Batch], Tensor]
    vocab_positions: Callable[[Batch], int]
    forward: Callable[[nn.Module, Batch, Tensor | None, DropoutKey], Tensor]
    measure: Measure | None = None
    begins_with: Relation | None = None
    causal: bool = False
    is_static: bool = False

    @property
    def losses(self) -> Measure:
        """Its losses, which are evaluated where nothing else is said."""
        return Measure(names=self.loss_names, count=self.count, forward=self.forward)
