"""The model on this process, one training step with it, and one evaluation."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from megatron.data.batch import Batch
from megatron.optim.buffer import ParamBuffer
from megatron.optim.optimizer import Optimizer
from megatron.optim.step_skipper import StepRule
from megatron.parallel.collectives import all_reduce_sum
from megatron.parallel.mesh import Mesh
from megatron.parallel.phases import Phases
from megatron.parallel.pipeline import run_schedule
from megatron.parallel.random import DropoutKey
from megatron.parallel.schedules import SCHEDULES, Action, Schedule, forward_only, with_transfers
from megatron.parallel.transfers import Transfers
from megatron.training.config import RunConfig
from megatron.training.stage import EvalStage, MeanLoss, StageModel, TrainStage
from megatron.training.task import EvalMetric, Task

# Microbatches that an evaluation puts through a pipeline at once, per stage: the more, the smaller the bubble.
EVAL_MICROBATCHES_PER_STAGE = 8

# Make a schedule for the costs of a run with this size of the padded vocabulary. Filled by `megatron.plugins`.
TUNED_SCHEDULES: dict[str, Callable[[RunConfig, int], Schedule]] = {}

# Make the rules of a run's optimizer, if its flags ask for them. Filled by `megatron.plugins`.
STEP_RULES: list[Callable[[RunConfig, Mesh], StepRule | None]] = []

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclasses.dataclass(frozen=True)
class GlobalBatch:
    """This replica's part of a global batch.

    Attributes:
        microbatches: on this process's device.
        denominators: [terms] what the losses are divided by, summed over the whole global batch.
        dropout_keys: one for each microbatch.
    """

    microbatches: list[Batch]
    denominators: Tensor
    dropout_keys: list[DropoutKey]


class Engine:
    """The model on this process, its parameters' memory and the optimizer. `build_engine` makes one.

    Attributes:
        config, task, mesh: those of the run.
        model: the chunks of the model on this process.
        modules, chunks, ops: its modules, their layers, and the operations that they compute with.
        dtype: of the parameters and activations.
        buffer: flat memory of parameters, gradients and master weights.
        optimizer: updates the parameters in `buffer`.
        transfers: sends and receives between pipeline stages.
        phases: mark the phases of a step.
        loss_weights: [terms] fp32, those of `task`.
        samples: number that this replica has trained on, by sequence length and positions that are projected to the
            vocabulary. A plug-in that measures throughput clears it.
        sums: tensors that plug-ins add to in forward passes. Passes that are repeated start from their old values.
        run_passes: runs forward and backward of a global batch, by the pipeline schedule unless a plug-in replaces it.
        run_optimizer: `Optimizer.step`, unless a plug-in replaces it.
    """

    def __init__(
        self, config: RunConfig, task: Task[Any], mesh: Mesh, model: StageModel, phases: Phases
    ) -> None:
        """Allocate memory for the parameters of `model`. They have no values yet."""
        self.config, self.task, self.mesh, self.phases = config, task, mesh, phases
        self.model, self.modules, self.chunks = model, model.modules, model.chunks
        self.ops = model.context.ops
        parallel = config.parallel
        self.dtype = DTYPES[config.training.precision]
        self.buffer = ParamBuffer(
            self.modules, model.buckets, mesh, parallel, dtype=self.dtype, phases=phases
        )
        rules = [rule for make in STEP_RULES if (rule := make(config, mesh)) is not None]
        self.optimizer = Optimizer(self.buffer, config.optimizer, rules)
        self.run_optimizer: Callable[..., dict[str, Tensor]] = self.optimizer.step
        # With sequence parallelism each tensor-parallel rank has its own part of what is sent already.
        scatter_gather = parallel.scatter_gather_tensors_in_pipeline and not parallel.sequence_parallel
        self.transfers = Transfers(mesh, scatter_gather=scatter_gather)
        weights = task.loss_weights or [1.0] * len(task.loss_names)
        self.loss_weights = torch.tensor(weights, dtype=torch.float32, device=mesh.device)
        self.samples: collections.Counter[tuple[int, int]] = collections.Counter()
        self.sums: list[Tensor] = []
        self.run_passes: Callable[[GlobalBatch, MeanLoss], None] = self._run_pipeline
        name = parallel.pipeline_schedule
        assert name is not None  # set by ParallelConfig
        tuned = TUNED_SCHEDULES.get(name)
        self.schedule = tuned(config, model.context.padded_vocab_size) if tuned else SCHEDULES[name]
        # With a batch size ramp-up the number of microbatches changes.
        self._actions = functools.lru_cache(maxsize=8)(self._make_actions)

    def train_step(
        self,
        batches: Iterator[Batch],
        *,
        num_microbatches: int,
        consumed_samples: int,
        lr: float,
        weight_decay: float,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Run forward and backward over a global batch, then one optimizer step. Nothing here waits for the device.

        Returns:
            [terms] this process's share of the mean losses: summed over replicas and stages, these are the means;
            and the statistics of `Optimizer.step`, the same on every process.
        """
        batch = self.next_global_batch(batches, num_microbatches, consumed_samples)
        losses = self.forward_backward(batch)
        self.reduce_gradients()
        with self.phases("optimizer"):
            stats = self.run_optimizer(losses * self.loss_weights, lr=lr, weight_decay=weight_decay)
        return losses, stats

    def next_global_batch(
        self, batches: Iterator[Batch], num_microbatches: int, consumed_samples: int
    ) -> GlobalBatch:
        """Take the next microbatches to the device. `consumed_samples` are those of all replicas before them."""
        with self.phases("batch-generator"):
            whole = list(itertools.islice(batches, num_microbatches))
            microbatches = self._to_device(whole)
        for batch in whole:
            self.samples.update(batch.work(self.task.num_logits(batch)))
        denominators = torch.stack([self.task.loss_denominators(batch) for batch in microbatches]).sum(0)
        # A loss without a single position is 0, not 0/0.
        denominators = all_reduce_sum(denominators, self.mesh.dp_cp).clamp(min=1)
        microbatches = self.with_loss_grads(microbatches, denominators)
        seed, size = self.config.training.seed, self.config.training.micro_batch_size
        first = [(i * self.mesh.dp.size + self.mesh.dp.rank) * size for i in range(num_microbatches)]
        documents = microbatches[0].document_ids is not None
        keys = [DropoutKey(seed, consumed_samples + i, documents=documents) for i in first]
        if self.ops.device_keys is not None:
            keys = self.ops.device_keys(keys, self.config.model.num_all_layers, self.mesh.device)
        return GlobalBatch(microbatches, denominators, keys)

    def with_loss_grads(self, microbatches: list[Batch], denominators: Tensor) -> list[Batch]:
        """Give microbatches the gradients of their losses, which depend on the loss scale."""
        scale = self.optimizer.loss_scale * self.loss_weights
        sequences = self.mesh.dp.size * sum(batch.num_sequences for batch in microbatches)
        grads = {"loss_grad": scale / denominators, "sequence_grad": scale[0] / sequences}
        return [dataclasses.replace(batch, **grads) for batch in microbatches]

    def forward_backward(self, batch: GlobalBatch, *, eager: bool = False) -> Tensor:
        """Add the gradients of this replica's microbatches to the buffer, times the optimizer's loss scale.

        Args:
            eager: run the pipeline schedule even if a plug-in replaces it, and leave all communication of gradients to
                `reduce_gradients`.

        Returns:
            [terms] this process's share of the mean losses, unscaled.
        """
        loss = MeanLoss(batch.denominators, self.optimizer.loss_scale * self.loss_weights)
        with self.phases("forward-backward"):
            if eager:
                self._run_pipeline(batch, loss, overlap=False)
            else:
                self.run_passes(batch, loss)
        return loss.total

    def _run_pipeline(self, batch: GlobalBatch, loss: MeanLoss, *, overlap: bool = True) -> None:
        actions = self._actions(self.schedule, len(batch.microbatches))
        run_schedule(self.train_stage(batch, loss, overlap=overlap), actions, self.transfers, self.phases)
        self.transfers.finish()

    def train_stage(self, batch: GlobalBatch, loss: MeanLoss, *, overlap: bool) -> TrainStage:
        """This process's pipeline stage for a global batch, which adds to `loss`."""
        return TrainStage(
            self.model,
            batch.microbatches,
            self.task.forward,
            loss=loss,
            dropout_keys=batch.dropout_keys,
            buffer=self.buffer,
            overlap=overlap,
        )

    def reduce_gradients(self) -> None:
        """Sum the gradients over the replicas, as far as backward has not done so already."""
        with self.phases("grads-reduce"):
            self.buffer.reducer.finish()

    def _make_actions(self, schedule: Schedule, microbatches: int) -> list[Action]:
        """Actions of this process's stage."""
        return self.all_actions(schedule, microbatches)[self.mesh.pp.rank]

    def all_actions(self, schedule: Schedule, microbatches: int) -> list[list[Action]]:
        """Actions of all stages."""
        lists = schedule(self.mesh.pp.size, len(self.chunks), microbatches)
        return with_transfers(lists, self.mesh.pp.size, self.config.parallel.v_shaped)

    def evaluate(self, batches: Iterable[Batch]) -> dict[str, float]:
        """Mean of the task's metric, by default its losses, over all samples of all replicas' `batches`."""
        metric = self.task.metric or self.task.losses
        sums, denominators = self.measure(batches, metric)
        return {name: s / max(n, 1) for name, s, n in zip(metric.names, sums, denominators, strict=True)}

    @torch.no_grad()
    def measure(self, batches: Iterable[Batch], metric: EvalMetric[Any]) -> tuple[list[float], list[float]]:
        """Sums and denominators of a metric over all replicas' `batches`, which may differ in number and size."""
        self.optimizer.finish()
        self.buffer.gather.finish()  # a metric may read a parameter of a module that it does not call
        totals = torch.zeros(2, len(metric.names), dtype=torch.float64, device=self.mesh.device)
        ranks, batches = self.mesh.pp.size, iter(batches)
        at_once = 1 if ranks == 1 else EVAL_MICROBATCHES_PER_STAGE * ranks
        while microbatches := self._to_device(itertools.islice(batches, at_once)):
            stage = EvalStage(self.model, microbatches, metric, totals)
            run_schedule(stage, self._actions(forward_only, len(microbatches)), self.transfers)
            self.transfers.finish()
        sums, denominators = all_reduce_sum(totals, self.mesh.dp_cp, self.mesh.pp).tolist()
        return sums, denominators

    def _to_device(self, batches: Iterable[Batch]) -> list[Batch]:
        """Copy this rank's part of batches to the mesh's device. From pinned memory this does not block the host."""
        device, cp = self.mesh.device, self.mesh.cp
        if cp.size > 1:
            prepare = self.task.before_dividing
            whole = batches if prepare is None else map(prepare, batches)
            batches = (batch.divide(cp.rank, cp.size) for batch in whole)
        return [batch.to(device, non_blocking=True) for batch in batches]
