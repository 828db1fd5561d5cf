"""Stop a run at a gradient that is not finite, and report where it comes from."""

from __future__ import annotations

import dataclasses
from typing import NoReturn

import torch

from megatron.data.loader import train_batches
from megatron.errors import TrainingFault, TransientFault
from megatron.faults.diagnosis import Diagnosis, corrupt_weights, diagnose
from megatron.parallel.collectives import gather_texts
from megatron.recipes.loss_scale import LossScaler
from megatron.reports.interval import is_bad
from megatron.training.loop import Hook, Trainer
from megatron.training.report import Interval

# A run without a finite gradient for so many iterations does not recover by itself.
MAX_BAD_STEPS = 10


class NonFiniteGuard(Hook):
    """Stop at the first iteration whose loss or gradient is not finite (--on-non-finite stop).

    With --on-non-finite skip, stop after `MAX_BAD_STEPS` such iterations in a row.

    Attributes:
        last_good_samples: samples consumed up to the last iteration known to be finite.
    """

    last_good_samples = 0

    def before_training(self, trainer: Trainer) -> None:
        self.last_good_samples = trainer.state.consumed_samples

    def after_collect(self, trainer: Trainer, rows: list[dict[str, float]]) -> None:
        for row in rows:
            if is_bad(row) and trainer.config.optimizer.on_non_finite == "stop":
                stop_on_non_finite(trainer, int(row["iteration"]), self.last_good_samples)
            self.last_good_samples = int(row["consumed samples"])

    def after_report(self, trainer: Trainer, interval: Interval) -> None:
        state = trainer.state
        for row in interval.rows:
            state.bad_steps = state.bad_steps + 1 if is_bad(row) else 0
            if state.bad_steps >= MAX_BAD_STEPS:
                raise TrainingFault(
                    f"iteration {row['iteration']}: no finite gradient for {state.bad_steps} iterations in a row; they "
                    "changed no weights. Continue from the last checkpoint with a lower --lr or a longer warm-up"
                )


def stop_on_non_finite(trainer: Trainer, iteration: int, consumed_samples: int) -> NoReturn:
    """Roll the run back to before `iteration`, save, recompute the step to find the cause, and raise.

    The weights are still those before the iteration: the optimizer skipped it and all that followed. Every process must
    call this.

    Args:
        iteration: the first one whose gradient was not finite.
        consumed_samples: samples consumed before it.
    """
    state = trainer.state
    faulty = iteration in state.history.faulty
    state.iteration, state.consumed_samples, state.evaluation_due = iteration - 1, consumed_samples, False
    state.history.rows = [row for row in state.history.rows if row["iteration"] < iteration]
    weights = corrupt_weights(trainer.engine)
    kept = "and nothing was saved" if weights else _save(trainer)
    rules = trainer.engine.optimizer.rules
    scaler = next((rule for rule in rules if isinstance(rule, LossScaler)), None)
    scaled = (
        f" at a loss scale of {scaler.loss_scale.item():g}, which cannot be lowered"
        if scaler is not None
        else ""
    )
    event = f"iteration {iteration}: the loss or its gradient is not finite{scaled}; no weights were changed, {kept}. "
    if weights:
        raise TransientFault(
            f"{event}Weights were not finite before it: {weights}; a machine has corrupted them"
        )
    try:
        found = _diagnose_step(trainer)
    except torch.OutOfMemoryError as error:
        why = str(error).splitlines()[0]
        raise TrainingFault(
            f"{event}There is too little memory to recompute it and find the cause: {why}"
        ) from None
    lower = ", or a lower --loss-scale" if scaler is not None and scaler.fixed else ""
    if found.repeats:
        raise TrainingFault(
            f"{event}Recomputed, it is not finite again: {found}. Continue from an earlier checkpoint (--ckpt-step) "
            f"with a lower --lr or a longer warm-up{lower}, or skip such iterations with --on-non-finite skip"
        )
    raise TransientFault(
        f"{event}Recomputed, it is finite: a machine computes wrongly. {_where(trainer, faulty)}"
    )


def _diagnose_step(trainer: Trainer) -> Diagnosis:
    """Recompute the step that follows the trainer's state."""
    consumed = trainer.state.consumed_samples
    batches = train_batches(
        trainer.datasets["train"],
        dataclasses.replace(trainer.config.data, num_workers=0),
        consumed_samples=consumed,
        **trainer.loader_arguments(),
    )
    microbatches = trainer.batch_schedule.num_microbatches(consumed)
    return diagnose(trainer.engine, trainer.engine.next_global_batch(batches, microbatches, consumed))


def _save(trainer: Trainer) -> str:
    """Save the state of the run unless it is saved already; returns the words for the report."""
    root, iteration = trainer.config.checkpoint.save, trainer.state.iteration
    if root is None:
        return "and nothing was saved, without --save"
    if iteration == 0:
        return "and nothing was saved, it being the first"
    if trainer.saver.iteration != iteration:
        trainer.save()
    trainer.saver.wait()
    return f"and {root} holds them as of iteration {iteration}"


def _where(trainer: Trainer, faulty: bool) -> str:
    """The replicas whose losses were not finite, for the report. The step itself no longer shows it."""
    flags = gather_texts("x" if faulty else "", trainer.mesh.world)
    ranks = [rank for rank, text in enumerate(flags) if text]
    if not ranks:
        return "All losses were finite, so the rank is unknown"
    return f"The loss was not finite on rank {', '.join(map(str, ranks))}; check the machines of its replica first"
