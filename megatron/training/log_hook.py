"""The hook that writes the log."""

from __future__ import annotations

from megatron.errors import TrainingFault
from megatron.optim.norms import model_norm
from megatron.parallel.timers import ITERATION
from megatron.training.devices import find_peak, max_memory, memory_lines
from megatron.training.loop import Hook, Trainer
from megatron.training.report import Interval, is_bad

# A run without a finite gradient for so many iterations does not recover by itself.
MAX_BAD_STEPS = 10


class Logging(Hook):
    """Report the iterations every --log-interval, and stop a run whose gradients stay not finite."""

    def before_training(self, trainer: Trainer) -> None:
        engine, config = trainer.engine, trainer.config
        self.peak = find_peak(trainer.mesh, engine.ops.matmul, engine.dtype)
        self.first = trainer.state.iteration + 1
        trainer.reporter.log(
            f"peak per device: {self.peak.flops / 1e12:.3g} TFLOP/s in {config.training.precision} ({self.peak.source})"
        )

    def after_step(self, trainer: Trainer) -> None:
        if trainer.is_done or trainer.is_due(trainer.config.logging.log_interval):
            self._report(trainer)
        if trainer.state.iteration == self.first:
            trainer.reporter.log(memory_lines(trainer.mesh, self.first))

    def _report(self, trainer: Trainer) -> None:
        state, config, size = trainer.state, trainer.config.logging, trainer.mesh.world.size
        trainer.collect()  # waits for the device, so before the clock is read
        seconds, iterations = trainer.clock.take()
        rows, state.history.rows = state.history.rows, []
        times = trainer.times(ITERATION, iterations)
        tokens, flops, exact_flops = trainer.engine.work.take(trainer.mesh)
        interval = Interval(
            rows=rows,
            loss_names=trainer.task.loss_names,
            train_iters=trainer.train_iters,
            # NVIDIA's log has the learning rate of the next step.
            lr=state.schedule.lr(state.consumed_samples),
            batch_size=trainer.batch_size,
            seconds=seconds / iterations,
            tokens_per_second=tokens / seconds,
            tflops=flops / seconds / size / 1e12,
            mfu=flops / (size * seconds * self.peak.flops),
            hfu=exact_flops / (size * seconds * self.peak.flops),
            params_norm=_params_norm(trainer) if config.log_params_norm else None,
            memory=max_memory(trainer.mesh) if config.log_memory_to_tensorboard else {},
            times=times if config.log_timers_to_tensorboard else {},
        )
        trainer.reporter.training(interval)
        trainer.log_times(times)
        for row in rows:
            state.bad_steps = state.bad_steps + 1 if is_bad(row) else 0
            if state.bad_steps >= MAX_BAD_STEPS:
                raise TrainingFault(
                    f"iteration {row['iteration']}: no finite gradient for {state.bad_steps} iterations in a row; they "
                    "changed no weights. Continue from the last checkpoint with a lower --lr or a longer warm-up"
                )


def _params_norm(trainer: Trainer) -> float:
    """L2 norm of all parameters. Every process must call it."""
    buffer = trainer.engine.buffer
    return model_norm(buffer.masters, buffer.buckets, buffer.mesh).item()
