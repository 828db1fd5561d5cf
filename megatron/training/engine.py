"""The model on this process, one training step with it, and one evaluation."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from megatron.data.batch import Batch
from megatron.errors import InputError
from megatron.model.context import ModelContext
from megatron.model.flops import flops_per_sample
from megatron.ops.backend import Ops, choose_ops
from megatron.optim.buffer import ParamBuffer
from megatron.optim.layout import lay_out, param_groups
from megatron.optim.optimizer import Optimizer
from megatron.parallel.collectives import all_equal, all_reduce_sum, raise_on_all_ranks
from megatron.parallel.mesh import Mesh
from megatron.parallel.pipeline import run_schedule
from megatron.parallel.random import DropoutKey, stable_hash
from megatron.parallel.schedules import SCHEDULES, Action, Schedule, forward_only, with_transfers
from megatron.parallel.stages import split_layers
from megatron.parallel.timers import Timers
from megatron.parallel.transfers import Transfers
from megatron.training.config import RunConfig
from megatron.training.costs import check_memory
from megatron.training.cuda_graph import GraphedPass, check_cuda_graph
from megatron.training.stage import EvalStage, MeanLoss, StageModel, TrainStage, mean_share
from megatron.training.task import EvalMetric, Task
from megatron.training.throughput import WorkCounter

# Microbatches that an evaluation puts through a pipeline at once, per stage: the more, the smaller the bubble.
EVAL_MICROBATCHES_PER_STAGE = 8

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
    """The model on this process, its parameters' memory and the optimizer.

    Attributes:
        ops: the operations that the model computes with.
        stages: the chunks of every pipeline rank.
        chunks: those of this process.
        modules: their modules.
        timers: time the phases of a step.
        work: counts tokens and operations.
        graph: with --cuda-graph, runs forward and backward of a microbatch as one graph.
    """

    def __init__(
        self,
        config: RunConfig,
        task: Task[Any],
        mesh: Mesh,
        *,
        vocab_size: int,
        padded_vocab_size: int,
        choose: Callable[..., Ops] = choose_ops,
        check: Callable[..., None] = check_memory,
        timers: Timers | None = None,
    ) -> None:
        """Build the model and allocate its memory; parameters have no values yet.

        A dry run has its own `choose` of operations, `check` of the device's memory, and `timers`.

        Raises:
            InputError: the device has too little memory for weights, gradients and optimizer state, or does not
                support what a flag asks for.
        """
        self.config, self.task, self.mesh = config, task, mesh
        parallel = config.parallel
        if config.training.cuda_graph:
            check_cuda_graph(config, task, mesh.device)
        self.graph = GraphedPass(self._pass, mesh.device) if config.training.cuda_graph else None
        self.stages = split_layers(parallel, config.model.num_layers)
        self.chunks = self.stages[mesh.pp.rank]
        self.dtype = DTYPES[config.training.precision]
        self.timers = timers or Timers(config.logging.timing_log_level, mesh.device)
        self.ops = self._choose_ops(choose, padded_vocab_size)
        context = ModelContext.on_mesh(
            mesh,
            config.model,
            parallel,
            vocab_size=vocab_size,
            padded_vocab_size=padded_vocab_size,
            ops=self.ops,
        )
        with torch.device("meta"):
            self.modules = [task.build_model(config, context, chunk) for chunk in self.chunks]
        groups = param_groups(config.optimizer, mesh, distributed=parallel.use_distributed_optimizer)
        buckets = lay_out(self.modules, groups, bucket_size=parallel.ddp_bucket_size)
        check(
            buckets,
            config.optimizer,
            half=config.training.precision != "fp32",
            device=mesh.device,
        )
        self.buffer = ParamBuffer(self.modules, buckets, mesh, parallel, dtype=self.dtype, timers=self.timers)
        self.optimizer = Optimizer(self.buffer, config.optimizer)
        self.model = StageModel(
            self.modules,
            self.chunks,
            config.model.hidden_size,
            torch.float32 if config.model.fp32_residual_connection else self.dtype,
            mesh.tp.size if parallel.sequence_parallel else 1,
        )
        # With sequence parallelism each tensor-parallel rank has its own part of what is sent already.
        scatter_gather = parallel.scatter_gather_tensors_in_pipeline and not parallel.sequence_parallel
        self.transfers = Transfers(mesh, scatter_gather=scatter_gather)
        self.work = WorkCounter(
            config.model,
            padded_vocab_size=padded_vocab_size,
            causal=task.causal,
            recompute=context.recompute,
            layers_per_chunk=[len(chunk.layers) for stage in self.stages for chunk in stage],
        )

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
        with self.timers("optimizer"):
            stats = self.optimizer.step(lr=lr, weight_decay=weight_decay, loss=self._spike_loss(losses))
        return losses, stats

    def next_global_batch(
        self, batches: Iterator[Batch], num_microbatches: int, consumed_samples: int
    ) -> GlobalBatch:
        """Take the next microbatches to the device. `consumed_samples` are those of all replicas before them."""
        with self.timers("batch-generator"):
            microbatches = self._to_device(itertools.islice(batches, num_microbatches))
        for batch in microbatches:
            logits = self.task.num_logits(batch)
            self.work.add(batch.num_sequences, seq_length=batch.seq_length, num_logits=logits)
        denominators = torch.stack([self.task.loss_denominators(batch) for batch in microbatches]).sum(0)
        # A loss without a single position is 0, not 0/0.
        denominators = all_reduce_sum(denominators, self.mesh.dp_cp).clamp(min=1)
        seed, size = self.config.training.seed, self.config.training.micro_batch_size
        first = [(i * self.mesh.dp.size + self.mesh.dp.rank) * size for i in range(num_microbatches)]
        return GlobalBatch(microbatches, denominators, [(seed, consumed_samples + i) for i in first])

    def forward_backward(self, batch: GlobalBatch, *, eager: bool = False) -> Tensor:
        """Add the gradients of this replica's microbatches to the buffer, times the optimizer's loss scale.

        Args:
            eager: run without the CUDA graph.

        Returns:
            [terms] this process's share of the mean losses, unscaled.
        """
        loss = MeanLoss(batch.denominators, self.optimizer.loss_scale)
        with self.timers("forward-backward"):
            if self.graph is not None and not eager:
                self._replay_graph(self.graph, batch, loss)
                return loss.total
            stage = TrainStage(
                self.model,
                batch.microbatches,
                self.task.forward,
                loss=loss,
                dropout_keys=batch.dropout_keys,
                buffer=self.buffer,
            )
            name = self.config.parallel.pipeline_schedule
            assert name is not None  # set by ParallelConfig
            actions = self._actions(SCHEDULES[name], len(batch.microbatches))
            run_schedule(stage, actions, self.transfers, self.timers)
            self.transfers.finish()
        return loss.total

    def reduce_gradients(self) -> None:
        """Sum the gradients over the replicas, as far as backward has not done so already."""
        with self.timers("grads-reduce"):
            self.buffer.reducer.finish()

    def _spike_loss(self, losses: Tensor) -> Tensor | None:
        """The global batch's loss on every process, where --spike-skip needs it."""
        if self.config.optimizer.spike_skip is None:
            return None
        return all_reduce_sum(losses.sum(), self.mesh.dp_cp, self.mesh.pp)

    def _actions(self, schedule: Schedule, microbatches: int) -> list[Action]:
        """Actions of this process's stage."""
        return _all_actions(schedule, self.mesh.pp.size, len(self.chunks), microbatches)[self.mesh.pp.rank]

    def _replay_graph(self, graph: GraphedPass, batch: GlobalBatch, loss: MeanLoss) -> None:
        step = {"denominators": batch.denominators}
        if isinstance(self.optimizer.loss_scale, Tensor):
            step["loss_scale"] = self.optimizer.loss_scale
        for microbatch in batch.microbatches:
            loss.total.add_(graph(microbatch, step))
            self.mesh.heartbeat.steps += 1

    def _pass(self, batch: Batch, step: dict[str, Tensor]) -> Tensor:
        """Forward and backward of one microbatch through the whole model, without dropout, to be captured.

        Args:
            step: the denominators of the global batch and, with fp16, the loss scale.

        Returns:
            [terms] the microbatch's share of the mean losses.
        """
        sums = self.task.forward(self.modules[0], batch, None, None)
        share, root = mean_share(sums, step["denominators"], step.get("loss_scale", 1.0))
        root.backward()
        return share

    def evaluate(self, batches: Iterable[Batch]) -> dict[str, float]:
        """Mean of the task's metric, by default its losses, over all samples of all replicas' `batches`."""
        metric = self.task.metric or self.task.losses
        sums, denominators = self.measure(batches, metric)
        return {name: s / max(n, 1) for name, s, n in zip(metric.names, sums, denominators, strict=True)}

    @torch.no_grad()
    def measure(self, batches: Iterable[Batch], metric: EvalMetric[Any]) -> tuple[list[float], list[float]]:
        """Sums and denominators of a metric over all replicas' `batches`, which may differ in number and size."""
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
        """Copy batches to the mesh's device. From pinned memory this does not block the host."""
        return [batch.to(self.mesh.device, non_blocking=True) for batch in batches]

    def _choose_ops(self, choose: Callable[..., Ops], padded_vocab_size: int) -> Ops:
        """Choose the operations, and check that every process chose the same."""
        config, mesh = self.config, self.mesh
        length = config.data.seq_length
        sample = flops_per_sample(
            config.model, seq_length=length, padded_vocab_size=padded_vocab_size, num_logits=length
        )
        work = sample * config.training.micro_batch_size / (mesh.tp.size * mesh.pp.size)
        with raise_on_all_ranks(mesh.world, InputError):
            ops = choose(config.ops, work=work, dtype=self.dtype, device=mesh.device)
        # Replicated values would drift apart if ranks computed them differently.
        if not all_equal(stable_hash(*ops.kinds, bits=32), mesh.world):
            raise InputError(
                f"rank {mesh.world.rank} computes with {', '.join(ops.kinds)} and other ranks with something else: "
                "their machines differ in torch, apex or the C++ compiler; make them alike, or use --ops-backend plain"
            )
        return ops

    def state_dict(self) -> dict[str, Any]:
        """State beside the tensors, as JSON: of --spike-skip, of the loss scaler, and the operations used."""
        optimizer = self.optimizer
        return {
            "spike_window": optimizer.step_skipper.state(),
            "loss_scaler": None if optimizer.scaler is None else optimizer.scaler.state(),
            "operations": list(self.ops.kinds),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` gave. Older checkpoints, and those of another precision, lack some of it."""
        if state["spike_window"] is not None:
            self.optimizer.step_skipper.load(state["spike_window"])
        if self.optimizer.scaler is not None and state.get("loss_scaler") is not None:
            self.optimizer.scaler.load(state["loss_scaler"])


@functools.lru_cache(maxsize=8)
def _all_actions(schedule: Schedule, ranks: int, chunks: int, microbatches: int) -> list[list[Action]]:
    """Actions of every pipeline rank."""
    return with_transfers(schedule(ranks, chunks, microbatches), ranks)
