"""A task: the parts of a run that an entry point supplies."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from megatron.parallel.stages import Chunk
from megatron.training.config import RunConfig

# An entry point makes its task before the command line is read, for which torch is not imported.
if TYPE_CHECKING:
    from torch import Tensor, nn

    from megatron.checkpoint.checkpoint import Checkpoint
    from megatron.data.batch import Batch
    from megatron.data.dataset import Dataset
    from megatron.model.context import ModelContext
    from megatron.optim.buffer import ParamBuffer
    from megatron.parallel.random import DropoutKey
    from megatron.tokenizer import Tokenizer

BatchT = TypeVar("BatchT", bound="Batch")

# (chunk of the model, batch, output of the chunk before or None, dropout key) to the input of the next chunk or, from
# the model's last chunk, [terms] the sums of the losses in fp32.
ForwardStep: TypeAlias = "Callable[[Any, BatchT, Tensor | None, DropoutKey | None], Tensor]"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalMetric(Generic[BatchT]):
    """Values that an evaluation gives, each a sum over a denominator, such as right answers over answers.

    Attributes:
        denominators: batch to [terms].
        forward: as of `Task`, giving the sums.
    """

    names: tuple[str, ...]
    denominators: Callable[[BatchT], Tensor]
    forward: ForwardStep[BatchT]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task(Generic[BatchT]):
    """The parts of a run that an entry point supplies.

    A loss is a sum and a denominator, never a mean. `Engine` sums both over the whole global batch before it divides,
    so that no loss depends on how samples are divided into microbatches.

    Attributes:
        name: saved in checkpoints, so that readers know which model they hold.
        loss_names: one or more terms; training minimizes the sum of their means, each times its weight.
        loss_weights: by default 1 for each term.
        build_model: builds a chunk of the model, or all of it, without values.
        build_datasets: (config, tokenizer, samples wanted for train, validation and test) to datasets by name: "train",
            and those to evaluate on.
        loss_denominators: batch to [terms], the number of tokens or samples that each term sums over.
        num_logits: batch to the number of positions of a sample that are projected to the vocabulary.
        forward: runs a chunk of the model.
        before_dividing: adds to a batch what a part of its sequences needs of the whole, with context parallelism.
        metric: what evaluations report; by default the losses.
        init_from: loaders by the names of other tasks, from whose checkpoints a run may start (--finetune). A loader
            gets the checkpoint and the buffer, which has its initial values, and returns a line for the log.
        causal: True if a position attends to no later one, which halves the operations of attention.
        is_static: True if all training batches have the same shapes, as --cuda-graph requires.
        length_flags: flags that say how long a run is.
        extra_config: entries that are added to the configuration in checkpoints.
    """

    name: str
    loss_names: tuple[str, ...]
    build_model: Callable[[RunConfig, ModelContext, Chunk | None], nn.Module]
    build_datasets: Callable[[RunConfig, Tokenizer, tuple[int, int, int]], dict[str, Dataset]]
    loss_denominators: Callable[[BatchT], Tensor]
    num_logits: Callable[[BatchT], int]
    forward: ForwardStep[BatchT]
    loss_weights: tuple[float, ...] | None = None
    before_dividing: Callable[[BatchT], BatchT] | None = None
    metric: EvalMetric[BatchT] | None = None
    init_from: Mapping[str, Callable[[Checkpoint, ParamBuffer], str]] = dataclasses.field(
        default_factory=dict
    )
    causal: bool = False
    is_static: bool = False
    length_flags: str = "--train-iters or another --train-... length"
    extra_config: dict[str, Any] = dataclasses.field(default_factory=dict)

    def total_loss(self, means: Mapping[str, float]) -> float:
        """The value that training minimizes, from the means of the terms by name."""
        weights = self.loss_weights or [1.0] * len(self.loss_names)
        return sum(weight * means[name] for name, weight in zip(self.loss_names, weights, strict=True))

    @property
    def losses(self) -> EvalMetric[BatchT]:
        """The task's losses as a metric."""
        return EvalMetric(names=self.loss_names, denominators=self.loss_denominators, forward=self.forward)
