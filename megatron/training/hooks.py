"""Hooks of every run: evaluation and saving."""

from __future__ import annotations

import math
from contextlib import ExitStack

from megatron.checkpoint.config import SAVE_MINUTES
from megatron.data.loader import eval_batches
from megatron.training.loop import Hook, Trainer
from megatron.training.report import EvalResult


class Evaluation(Hook):
    """Evaluate the losses every --eval-interval iterations, at the end, and with --skip-train."""

    def before_training(self, trainer: Trainer) -> None:
        if trainer.state.evaluation_due:
            with trainer.clock.paused():
                self._evaluate_between_steps(trainer)

    def after_step(self, trainer: Trainer) -> None:
        due = trainer.is_due(trainer.config.training.eval_interval)
        trainer.state.evaluation_due = due or trainer.is_done
        # An evaluation due when the run stops early is left to the run that resumes.
        if due and trainer.goes_on:
            with trainer.clock.paused():
                self._evaluate_between_steps(trainer)

    def at_end(self, trainer: Trainer) -> None:
        where = f"iteration {trainer.state.iteration}"
        if trainer.config.training.skip_train:
            evaluate_losses(trainer, "validation", f"{where} on validation set")
            evaluate_losses(trainer, "test", f"{where} on test set")
            self._run_hooks(trainer, where)
        elif trainer.state.evaluation_due:
            evaluate_losses(trainer, "validation", "the end of training for val data")
            evaluate_losses(trainer, "test", "the end of training for test data")
            self._run_hooks(trainer, "the end of training")
            trainer.mark_evaluated()

    def _evaluate_between_steps(self, trainer: Trainer) -> None:
        if trainer.is_due(trainer.config.training.eval_interval):
            trainer.collect()
            with ExitStack() as contexts:
                for hook in trainer.hooks:
                    contexts.enter_context(hook.during_evaluation(trainer))
                where = f"iteration {trainer.state.iteration}"
                evaluate_losses(trainer, "validation", where)
                self._run_hooks(trainer, where)
        trainer.state.evaluation_due = False

    def _run_hooks(self, trainer: Trainer, where: str) -> None:
        for hook in trainer.hooks:
            hook.evaluate(trainer, where)


def evaluate_losses(trainer: Trainer, split: str, where: str) -> None:
    """Evaluate on the first samples of a split, the same ones each time, if there is data of that split."""
    if split not in trainer.datasets:
        return
    count = trainer.config.training.eval_iters * trainer.batch_schedule.global_batch_size
    batches = eval_batches(
        trainer.datasets[split], trainer.config.data, samples=range(count), **trainer.loader_arguments()
    )
    with trainer.engine.phases("evaluate"):
        losses = trainer.engine.evaluate(batches)
    values: dict[str, float] = {}
    for name, loss in losses.items():
        values |= {f"{name} {split}": loss, f"{name} {split} ppl": math.exp(min(20.0, loss))}
    trainer.report_evaluation(EvalResult(title=split, where=where, values=values))


class Saving(Hook):
    """Save every --save-interval iterations, by default every SAVE_MINUTES, and when the run ends or stops."""

    saved = 0  # `Trainer.elapsed` at the last save

    def after_step(self, trainer: Trainer) -> None:
        interval, minutes = trainer.config.checkpoint.save_interval, (trainer.elapsed - self.saved) / 60
        due = trainer.is_due(interval) if interval else minutes >= SAVE_MINUTES
        if due or not trainer.goes_on:
            self.saved = trainer.elapsed
            with trainer.clock.paused():
                trainer.save()
