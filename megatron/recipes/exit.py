"""Exit before the last iteration (--exit-interval, --exit-duration-in-mins)."""

from __future__ import annotations

from megatron.recipes.config import ExitConfig
from megatron.training.loop import Hook, Trainer


class Exit(Hook):
    """Stop the run when a flag says so. Called before hooks that ask whether the run goes on."""

    def after_step(self, trainer: Trainer) -> None:
        config, iteration = trainer.config.plugin(ExitConfig), trainer.state.iteration
        minutes, interval = config.exit_duration_in_mins, config.exit_interval
        if trainer.stop_reason is not None:
            return
        if minutes is not None and trainer.elapsed >= 60 * minutes:
            trainer.stop_reason = f"--exit-duration-in-mins {minutes} is over"
        elif trainer.is_due(interval):
            trainer.stop_reason = f"iteration {iteration} is a multiple of --exit-interval {interval}"
