"""Post-validation of the optimizer's step (--enable-optimizer-post-validation; arXiv 2401.10241 section 4).

The norm of the whole model's gradients is known only after the last stage's last backward pass. A stage that ends
earlier does not wait for it: it updates its weights as if the gradients needed no clipping and were finite, and begins
the forward passes of the next step. Before its first backward pass it validates the update. If that was wrong, the
stage restores its weights, updates them as it should have done, and repeats the forward passes.

All stages get the same norm and decide alike, so all of them go on, or all go back. If the last step was clipped or
skipped, the next one waits for the norm: gradients that always need clipping are not updated twice.

In the paper each stage passes on the norm of the stages so far, and does not update if that needs clipping already.
Here one asynchronous all-reduce has the whole norm, and the forecast is the outcome of the last step.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

from megatron.optim.norms import flat_square, stage_sum
from megatron.optim.optimizer import Optimizer
from megatron.parallel.collectives import Pending, start_all_reduce
from megatron.parallel.mesh import join
from megatron.parallel.pipeline import run_schedule
from megatron.parallel.schedules import Action
from megatron.performance.config import PerformanceConfig
from megatron.performance.validation_lists import with_validation
from megatron.training.engine import Engine, GlobalBatch
from megatron.training.stage import MeanLoss


def post_validate(engine: Engine) -> None:
    """Let the steps of an engine be validated afterward, if its run has --enable-optimizer-post-validation."""
    backup = make_backup(engine)
    if backup is not None:
        validation = PostValidation(engine, backup)
        engine.run_passes, engine.run_optimizer = validation.run_passes, validation.step
        engine.optimizer.on_finish.append(validation.validate)


class Backup:
    """Copies of what an optimizer's update changes, with its gradients: 16 bytes per element of a shard with AdamW."""

    def __init__(self, optimizer: Optimizer) -> None:
        states = (x for shards in optimizer.state.values() for x in shards)
        self.tensors = [*optimizer.buffer.masters, *optimizer.grads, *states, optimizer.step_count]
        self.copies = [torch.empty_like(x) for x in self.tensors]

    def save(self) -> None:
        for copy, x in zip(self.copies, self.tensors, strict=True):
            copy.copy_(x)

    def restore(self) -> None:
        for copy, x in zip(self.copies, self.tensors, strict=True):
            x.copy_(copy)


def make_backup(engine: Engine) -> Backup | None:
    """Allocate the backup of an engine's optimizer, if its run has --enable-optimizer-post-validation."""
    enabled = engine.config.plugin(PerformanceConfig).enable_optimizer_post_validation
    return Backup(engine.optimizer) if enabled else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """A step of the optimizer that is not validated.

    Attributes:
        square: sum of the squares of the whole model's gradients, an fp64 scalar.
        losses, lr, weight_decay: as for `Optimizer.step`.
        stats: the statistics of the step, empty until it is validated.
        updated: true if the weights are updated already.
    """

    square: Pending
    losses: Tensor
    lr: float
    weight_decay: float
    stats: dict[str, Tensor]
    updated: bool


class PostValidation:
    """Steps of an engine's optimizer that are validated afterward.

    Validation makes the host wait for the device, once a step.

    Attributes:
        unvalidated: the last step, unless it is validated.
        speculates: the next step updates the weights before the norm is known.
    """

    def __init__(self, engine: Engine, backup: Backup) -> None:
        self.engine, self.optimizer, self.backup = engine, engine.optimizer, backup
        # A group of its own: NCCL would run transfers between stages after a sum that was started before them.
        self.axis = join(engine.mesh.pp.ranks, engine.mesh.pp.name, engine.mesh)
        self.unvalidated: Step | None = None
        self.speculates = False
        self.actions = functools.lru_cache(maxsize=8)(self._make_actions)

    def _make_actions(self, microbatches: int) -> list[Action]:
        lists = self.engine.all_actions(self.engine.schedule, microbatches)
        return with_validation(lists)[self.engine.mesh.pp.rank]

    def run_passes(self, batch: GlobalBatch, loss: MeanLoss) -> None:
        """Run forward and backward of a global batch, and validate the step before in between."""
        engine, actions = self.engine, self.actions(len(batch.microbatches))
        sums = [x.clone() for x in engine.sums]
        while not run_schedule(
            engine.train_stage(batch, loss, overlap=True),
            actions,
            engine.transfers,
            engine.phases,
            self.validate,
        ):
            loss.total.zero_()
            for x, before in zip(engine.sums, sums, strict=True):
                x.copy_(before)
            loss.loss_scale = engine.optimizer.loss_scale * engine.loss_weights
            microbatches = engine.with_loss_grads(batch.microbatches, batch.denominators)
            batch = dataclasses.replace(batch, microbatches=microbatches)
        engine.transfers.finish()

    @torch.no_grad()
    def step(self, losses: Tensor, *, lr: float, weight_decay: float) -> dict[str, Tensor]:
        """Update the weights, or wait for the norm if that promises more. Arguments are those of `Optimizer.step`.

        Returns:
            The statistics of the step, which are there once it is validated.
        """
        optimizer, buffer = self.optimizer, self.optimizer.buffer
        optimizer.prepare()
        square = stage_sum(optimizer.grads, buffer.buckets, buffer.mesh, flat_square)
        self.unvalidated = step = Step(
            square=start_all_reduce(square, self.axis),
            losses=losses,
            lr=lr,
            weight_decay=weight_decay,
            stats={},
            updated=self.speculates,
        )
        if step.updated:
            self.backup.save()
            zero = torch.zeros_like(square, dtype=torch.float32)
            grad_scale = optimizer.grad_scale(zero)
            optimizer.update(lr=lr, weight_decay=weight_decay, grad_scale=grad_scale, skipped=zero)
            buffer.grads.zero_()
        else:
            self.validate()
        return step.stats

    @torch.no_grad()
    def validate(self) -> bool:
        """Validate the last step, and correct it if it was wrong. Every process must call it.

        Returns:
            False if forward passes since that step had wrong weights or another loss scale.
        """
        step, self.unvalidated = self.unvalidated, None
        if step is None:
            return True
        optimizer, buffer = self.optimizer, self.optimizer.buffer
        norm, loss_scale = step.square.wait().sqrt().float(), optimizer.loss_scale
        assumed = optimizer.grad_scale(torch.zeros_like(norm))
        grad_scale, stats = optimizer.decide(norm, step.losses)
        step.stats.update(stats)
        same_scale = torch.as_tensor(optimizer.loss_scale == loss_scale, device=norm.device)
        is_right = stats["skipped"] == 0
        if grad_scale is not None:
            is_right &= grad_scale == assumed
        self.speculates, keeps_scale = torch.stack((is_right, same_scale)).tolist()
        if not (step.updated and self.speculates):
            if step.updated:
                buffer.gather.finish()
                self.backup.restore()
            optimizer.update(
                lr=step.lr, weight_decay=step.weight_decay, grad_scale=grad_scale, skipped=stats["skipped"]
            )
        goes_on = step.updated and self.speculates and keeps_scale
        if not goes_on:
            buffer.grads.zero_()
        return goes_on
