"""The hook that collects the values of iterations for reports."""

from __future__ import annotations

from megatron.training.loop import Hook, Trainer
from megatron.training.report import Interval


class Logging(Hook):
    """Report the iterations every --log-interval: hooks write the log line and everything else."""

    def after_step(self, trainer: Trainer) -> None:
        state = trainer.state
        if not (trainer.is_done or trainer.is_due(trainer.config.logging.log_interval)):
            return
        trainer.collect()  # waits for the device, so before the clock is read
        seconds, iterations = trainer.clock.take()
        interval = Interval(
            rows=state.history.take(),
            loss_names=trainer.task.loss_names,
            train_iters=trainer.train_iters,
            # NVIDIA's log has the learning rate of the next step.
            lr=state.schedule.lr(state.consumed_samples),
            batch_size=trainer.batch_size,
            iterations=iterations,
            seconds=seconds / iterations,
        )
        for hook in trainer.hooks:
            hook.before_report(trainer, interval)
        for hook in trainer.hooks:
            hook.after_report(trainer, interval)
