"""This process's pipeline stage in training and in evaluation, and the losses of a step."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megatron.data.batch import Batch
from megatron.model.context import ModelContext
from megatron.optim.buffer import ParamBuffer
from megatron.optim.layout import Bucket
from megatron.parallel.pipeline import PipelineStage, WgradQueue
from megatron.parallel.random import DropoutKey
from megatron.parallel.stages import Chunk
from megatron.training.task import EvalMetric, ForwardStep


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageModel:
    """The model chunks of this process.

    Attributes:
        modules: one for each of `chunks`.
        context: the context that the modules were built with.
        buckets: layout of their parameters in memory.
        hidden_size: last dimension of the activations between chunks, [sequence, samples, hidden_size].
        hidden_dtype: their dtype.
        sequence_shards: number of shards of their sequence dimension; 1 without sequence parallelism.
        wgrads: where split backward passes leave products.
    """

    modules: list[nn.Module]
    chunks: list[Chunk]
    context: ModelContext
    buckets: list[Bucket]
    hidden_size: int
    hidden_dtype: torch.dtype
    sequence_shards: int
    wgrads: WgradQueue = dataclasses.field(default_factory=WgradQueue)


class MeanLoss:
    """The mean losses of a global batch, accumulated over its microbatches.

    Attributes:
        total: [terms] fp64, this process's share of the mean losses. Their sum over replicas and stages is the mean.
    """

    def __init__(self, denominators: Tensor, loss_scale: Tensor) -> None:
        """Both are [terms]: denominators of the whole global batch, and the factor of each mean's gradient."""
        self.denominators, self.loss_scale = denominators, loss_scale
        self.total = torch.zeros(len(denominators), dtype=torch.float64, device=denominators.device)

    def add(self, sums: Tensor) -> Tensor:
        """Add a microbatch's losses, [terms]. Returns the scalar to differentiate, its scaled share of the mean."""
        share = sums / self.denominators
        self.total.add_(share.detach())
        # 0 x NaN is NaN: a non-finite loss makes the gradient non-finite, even where the loss has a finite derivative.
        return (share * (self.loss_scale + 0 * share.detach())).sum()


class ModelStage(PipelineStage):
    """A stage that runs a task's forward function on microbatches."""

    def __init__(self, model: StageModel, microbatches: Sequence[Batch], forward: ForwardStep) -> None:
        super().__init__(model.hidden_dtype, model.wgrads)
        self.model, self.microbatches, self.forward_step = model, microbatches, forward

    def recv_shape(self, microbatch: int) -> tuple[int, int, int]:
        batch = self.microbatches[microbatch]
        return batch.seq_length // self.model.sequence_shards, batch.num_sequences, self.model.hidden_size

    def compute(self, chunk: int, microbatch: int, x: Tensor | None) -> Tensor:
        module, batch = self.model.modules[chunk], self.microbatches[microbatch]
        out = self.forward_step(module, batch, x, self.dropout_key(microbatch))
        return self.accumulate(microbatch, out) if self.model.chunks[chunk].last else out

    def dropout_key(self, microbatch: int) -> DropoutKey | None:
        """Dropout key of a microbatch; None disables dropout."""
        return None

    @abstractmethod
    def accumulate(self, microbatch: int, sums: Tensor) -> Tensor:
        """Accumulate the sums, [terms], that the model's last chunk returns. Training differentiates the result."""


class TrainStage(ModelStage):
    """A stage of a training step: losses are averaged over the global batch.

    With `overlap`, gradients are reduced from the last backward pass on.
    """

    def __init__(
        self,
        model: StageModel,
        microbatches: Sequence[Batch],
        forward: ForwardStep,
        *,
        loss: MeanLoss,
        dropout_keys: Sequence[DropoutKey | None],
        buffer: ParamBuffer,
        overlap: bool,
    ) -> None:
        super().__init__(model, microbatches, forward)
        self.loss, self.dropout_keys, self.buffer, self.overlap = loss, dropout_keys, buffer, overlap

    def dropout_key(self, microbatch: int) -> DropoutKey | None:
        return self.dropout_keys[microbatch]

    def accumulate(self, microbatch: int, sums: Tensor) -> Tensor:
        return self.loss.add(sums)

    def backward(self, chunk: int, microbatch: int, grad: Tensor | None) -> Tensor | None:
        with self.buffer.backward(chunk):
            return super().backward(chunk, microbatch, grad)

    def begin_last_backward(self, chunk: int) -> None:
        if self.overlap:
            self.buffer.reducer.begin_last_backward(chunk)


class EvalStage(ModelStage):
    """A stage of an evaluation, which adds a metric's sums and denominators to `totals`, [2, terms] fp64."""

    def __init__(
        self, model: StageModel, microbatches: Sequence[Batch], metric: EvalMetric, totals: Tensor
    ) -> None:
        super().__init__(model, microbatches, metric.forward)
        self.metric, self.totals = metric, totals

    def accumulate(self, microbatch: int, sums: Tensor) -> Tensor:
        self.totals[0] += sums
        self.totals[1] += self.metric.denominators(self.microbatches[microbatch])
        return sums
