"""One process's part of the model, one step of training with it, and one evaluation."""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from megatron.data.loader import Batch
from megatron.flags import InputError
from megatron.model.flops import flops_per_sample
from megatron.model.layers import TensorParallel
from megatron.ops.backend import Ops, choose_ops
from megatron.optim.buffer import ParamBuffer
from megatron.optim.layout import lay_out
from megatron.optim.optimizer import Optimizer
from megatron.parallel.collectives import all_equal, all_reduce_sum, together
from megatron.parallel.mesh import ALONE, Mesh
from megatron.parallel.pipeline import Transfers, run_schedule
from megatron.parallel.random import key
from megatron.parallel.recompute import Recompute
from megatron.parallel.schedules import SCHEDULES, Action, Schedule, forward_only, with_transfers
from megatron.parallel.stages import split_layers
from megatron.parallel.timers import OFF, Timers
from megatron.training.config import RunConfig
from megatron.training.costs import check_memory
from megatron.training.cuda_graph import GraphedPass, Inputs, check_cuda_graph
from megatron.training.task import Measure, Part, Task

# Microbatches that an evaluation puts through a pipeline at once, per stage: the pipeline stands empty at both ends.
EVAL_MICROBATCHES_PER_STAGE = 8

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class Engine:
    """What this process holds of the model, and how a batch goes through it.

    Attributes:
        ops: what computes its hot operations.
        parts: the chunks of the model that this process holds, without their parameters.
        chunks: the same as modules.
        timers: of what a step consists of.
        graph: with --cuda-graph, what takes a microbatch through forward and backward.
    """

    def __init__(
        self,
        config: RunConfig,
        task: Task,
        mesh: Mesh,
        *,
        vocab_size: int,
        padded_vocab_size: int,
        choose: Callable[..., Ops] = choose_ops,
        check: Callable[..., None] = check_memory,
    ) -> None:
        """Memory is taken, but parameters have no values yet.

        `choose` finds the operations and `check` sees to it that the model fits; of a dry run the machine has no say.

        Raises:
            InputError: the device has too little memory for weights, gradients and optimizer state, or a flag asks
                for what cannot be had on it.
        """
        self.config, self.task, self.mesh = config, task, mesh
        parallel = config.parallel
        if config.training.cuda_graph:
            check_cuda_graph(config, task, mesh.device)
        self.graph = GraphedPass(self._pass, mesh.device) if config.training.cuda_graph else None
        self.stages = split_layers(parallel, config.model.num_layers)
        self.parts = self.stages[mesh.pp.rank]
        self.dtype = DTYPES[config.training.precision]
        self.recompute = Recompute.from_config(parallel, mesh.tp)
        self.ops = self._choose_ops(choose, padded_vocab_size)
        tp = TensorParallel(mesh.tp, parallel.sequence_parallel, self.ops)
        with torch.device("meta"):
            self.chunks = [
                task.build_model(
                    config,
                    Part(
                        vocab_size=vocab_size,
                        padded_vocab_size=padded_vocab_size,
                        chunk=chunk,
                        tp=tp,
                        recompute=self.recompute,
                    ),
                )
                for chunk in self.parts
            ]
        check(
            lay_out(
                self.chunks,
                bucket_size=parallel.ddp_bucket_size,
                shards=mesh.dp if parallel.use_distributed_optimizer else ALONE,
            ),
            config.optimizer,
            half=config.training.precision != "fp32",
            device=mesh.device,
        )
        self.timers = Timers(config.logging.timing_log_level, mesh.device)
        self.buffer = ParamBuffer(self.chunks, mesh, parallel, dtype=self.dtype, timers=self.timers)
        self.optimizer = Optimizer(self.buffer, config.optimizer)
        # With sequence parallelism each tensor-parallel process has its own part of what is sent.
        divide = parallel.scatter_gather_tensors_in_pipeline and not parallel.sequence_parallel
        self.transfers = Transfers(mesh, scatter_gather=divide)
        # Samples of this replica that steps have gone through, by their length and their positions at the vocabulary.
        self.samples: collections.Counter[tuple[int, int]] = collections.Counter()

    def _choose_ops(self, choose: Callable[..., Ops], padded_vocab_size: int) -> Ops:
        """The operations, which every process has to have alike."""
        config, mesh = self.config, self.mesh
        length = config.data.seq_length
        sample = flops_per_sample(
            config.model, seq_length=length, padded_vocab_size=padded_vocab_size, vocab_positions=length
        )
        work = sample * config.training.micro_batch_size / (mesh.tp.size * mesh.pp.size)
        with together(mesh.world, InputError):
            ops = choose(config.ops, work=work, dtype=self.dtype, device=mesh.device)
        # What all hold alike would drift apart if it were not computed alike.
        if not all_equal(key(*ops.kinds, bits=32), mesh.world):
            raise InputError(
                f"rank {mesh.world.rank} would compute by {', '.join(ops.kinds)}, and others by something else: "
                "their machines differ in torch, apex or the C++ compiler; make them alike, or use --ops-backend plain"
            )
        return ops

    def _run(
        self,
        batches: list[Batch],
        end: Callable[[int, Tensor], Tensor],
        *,
        dropout_key: Callable[[int], tuple[int, int] | None],
        forward: Callable[..., Tensor],
        training: bool,
    ) -> None:
        """Take microbatches through this process's stage. `end` is given the number of a microbatch and the sums
        of its losses, where they come out."""

        def compute(chunk: int, microbatch: int, hidden: Tensor | None) -> Tensor:
            batch, key = batches[microbatch], dropout_key(microbatch)
            out = forward(self.chunks[chunk], batch, hidden, key)
            return end(microbatch, out) if self.parts[chunk].last else out

        def shape(microbatch: int) -> tuple[int, int, int]:
            samples, length = tokens_of(batches[microbatch]).shape
            divided = self.mesh.tp.size if self.config.parallel.sequence_parallel else 1
            return length // divided, samples, self.config.model.hidden_size

        schedule = SCHEDULES[self.config.parallel.pipeline_schedule] if training else forward_only
        run_schedule(
            _actions(schedule, self.mesh.pp.size, len(self.parts), len(batches))[self.mesh.pp.rank],
            compute,
            self.transfers,
            shape=shape,
            dtype=torch.float32 if self.config.model.fp32_residual_connection else self.dtype,
            begin_last_backward=self.buffer.begin_last_backward,
            timers=self.timers if training else OFF,
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
        """Forward and backward over the microbatches of one global batch, then one step of the optimizer.

        Nothing here waits for the device.

        Returns:
            [terms] this process's share of the mean losses, which summed over replicas and stages are the means;
            and what `Optimizer.step` tells, the same on every process.
        """
        losses = self.compute_gradients(
            batches, num_microbatches=num_microbatches, consumed_samples=consumed_samples
        )
        loss = None
        if self.config.optimizer.spike_skip is not None:
            loss = all_reduce_sum(all_reduce_sum(losses.sum(), self.mesh.dp), self.mesh.pp)
        with self.timers("optimizer"):
            return losses, self.optimizer.step(lr=lr, weight_decay=weight_decay, loss=loss)

    def compute_gradients(
        self, batches: Iterator[Batch], *, num_microbatches: int, consumed_samples: int
    ) -> Tensor:
        """Forward and backward over the microbatches of one global batch, and the sum over the replicas.

        A loss that is not finite makes a gradient that is not. The gradient is that of the loss times
        `Optimizer.loss_scale`; the return, as of `train_step`, is not scaled.
        """
        with self.timers("batch-generator"):
            microbatches = [self._to_device(batch) for batch in itertools.islice(batches, num_microbatches)]
        for batch in microbatches:
            samples, length = tokens_of(batch).shape
            self.samples[length, self.task.vocab_positions(batch)] += samples
        counts = torch.stack([self.task.count(batch) for batch in microbatches]).sum(0)
        # With every position masked the loss is 0, not 0/0.
        counts = all_reduce_sum(counts, self.mesh.dp).clamp(min=1)
        losses = torch.zeros(len(self.task.loss_names), dtype=torch.float64, device=self.mesh.device)
        loss_scale = self.optimizer.loss_scale

        def end(_: int, sums: Tensor) -> Tensor:
            share, root = share_and_root(sums, counts, loss_scale)
            losses.add_(share)
            return root

        def dropout_key(microbatch: int) -> tuple[int, int]:
            before = (
                microbatch * self.mesh.dp.size + self.mesh.dp.rank
            ) * self.config.training.micro_batch_size
            return self.config.training.seed, consumed_samples + before

        with self.timers("forward-backward"):
            if self.graph is None:
                self._run(
                    microbatches, end, dropout_key=dropout_key, forward=self.task.forward, training=True
                )
            else:
                scale = {"loss_scale": loss_scale} if self.optimizer.scaler is not None else {}
                for batch in microbatches:
                    losses.add_(self.graph(batch | {"counts": counts} | scale))
                    self.mesh.activity.steps += 1
        with self.timers("grads-reduce"):
            self.buffer.finish_reduce()
        return losses

    def _pass(self, inputs: Inputs) -> Tensor:
        """Forward and backward of one microbatch, where this process holds the whole model and nothing is dropped.

        Args:
            inputs: a batch, with the counts of the global batch and, where there is one, the scale of the loss.

        Returns:
            [terms] the microbatch's share of the mean losses.
        """
        sums = self.task.forward(self.chunks[0], inputs, None, None)
        share, root = share_and_root(sums, inputs["counts"], inputs.get("loss_scale", 1.0))
        root.backward()
        return share

    def evaluate(self, batches: Iterable[Batch]) -> dict[str, float]:
        """Mean of each loss, or of what the task measures instead, over all samples of all replicas' `batches`."""
        measure = self.task.measure or self.task.losses
        sums, counts = self.measure(batches, measure)
        return {name: s / max(c, 1) for name, s, c in zip(measure.names, sums, counts, strict=True)}

    @torch.no_grad()
    def measure(self, batches: Iterable[Batch], measure: Measure) -> tuple[list[float], list[float]]:
        """Sums and counts over all samples of all replicas' `batches`, which may differ in number and size."""
        totals = torch.zeros(2, len(measure.names), dtype=torch.float64, device=self.mesh.device)
        stages, batches = self.mesh.pp.size, iter(batches)
        at_once = 1 if stages == 1 else EVAL_MICROBATCHES_PER_STAGE * stages
        while group := [self._to_device(batch) for batch in itertools.islice(batches, at_once)]:

            def end(microbatch: int, sums: Tensor, group: list[Batch] = group) -> Tensor:
                totals[0] += sums
                totals[1] += measure.count(group[microbatch])
                return sums

            self._run(group, end, dropout_key=lambda _: None, forward=measure.forward, training=False)
        sums, counts = all_reduce_sum(all_reduce_sum(totals, self.mesh.dp), self.mesh.pp).tolist()
        return sums, counts

    def _to_device(self, batch: Batch) -> Batch:
        """The batch on the mesh's device; from pinned memory the host does not wait for the copy."""
        return {name: tensor.to(self.mesh.device, non_blocking=True) for name, tensor in batch.items()}


@functools.lru_cache(maxsize=8)
def _actions(schedule: Schedule, stages: int, chunks: int, microbatches: int) -> list[list[Action]]:
    """Of every stage, what it does in this order."""
    return with_transfers(schedule(stages, chunks, microbatches), stages)


def share_and_root(sums: Tensor, counts: Tensor, loss_scale: Tensor | float) -> tuple[Tensor, Tensor]:
    """Of the sums of a microbatch's losses, [terms]: its share of the mean losses, and the scalar that backward begins
    at."""
    share = sums / counts
    # Times the scale; if the loss is not finite, times NaN.
    return share.detach(), (share * (loss_scale + 0 * share.detach())).sum()


def tokens_of(batch: Batch) -> Tensor:
    """The token ids of a batch, [samples, sequence]."""
    return next(iter(batch.values()))
