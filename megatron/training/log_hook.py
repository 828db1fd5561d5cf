"""The hook that writes the log."""

from __future__ import annotations

from megatron.optim.norms import model_norm
from megatron.parallel.timers import ITERATION
from megatron.training.devices import find_peak, max_memory, memory_lines
from megatron.training.loop import Hook, Trainer
from megatron.training.report import Interval


class Logging(Hook):
    """Report the iterations every --log-interval."""

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
        state, size, optional = trainer.state, trainer.mesh.world.size, trainer.reporter.optional_values
        trainer.collect()  # waits for the device, so before the clock is read
        seconds, iterations = trainer.clock.take()
        rows = state.history.take()
        times = trainer.engine.timers.take(ITERATION, trainer.mesh.world, iterations)
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
            params_norm=_params_norm(trainer) if trainer.config.logging.log_params_norm else None,
            memory=max_memory(trainer.mesh) if "memory" in optional else {},
            times=times if "times" in optional else {},
        )
        trainer.reporter.training(interval)
        trainer.reporter.log_times(times)
        for hook in trainer.hooks:
            hook.after_report(trainer, rows)


def _params_norm(trainer: Trainer) -> float:
    """L2 norm of all parameters. Every process must call it."""
    buffer = trainer.engine.buffer
    return model_norm(buffer.masters, buffer.buckets, buffer.mesh).item()
