"""The training loop."""

from __future__ import annotations

import collections
import dataclasses
import gc
import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.utils.data import Dataset

from megatron import __version__
from megatron.checkpoint.checkpoint import mark_evaluated
from megatron.checkpoint.saver import Saver
from megatron.data.loader import Batch, eval_batches, train_batches
from megatron.evaluation.tasks import ZeroShotTask
from megatron.evaluation.zero_shot import make_batches
from megatron.flags import TrainingFault
from megatron.model.flops import exact_flops_per_sample, flops_per_sample
from megatron.optim.schedule import Schedule
from megatron.parallel.collectives import all_reduce_sum
from megatron.parallel.mesh import Mesh
from megatron.parallel.timers import BETWEEN, ITERATION, times_text
from megatron.tokenizer import Tokenizer
from megatron.training.batch_size import BatchSchedule
from megatron.training.config import RunConfig, TrainingConfig
from megatron.training.devices import Peak, memory_lines, most_memory
from megatron.training.engine import Engine
from megatron.training.eval_tasks import measure_of
from megatron.training.faults import stop_on_non_finite
from megatron.training.profile import Profiler
from megatron.training.replicas import check_replicas
from megatron.training.report import History, Interval, Reporter, is_bad
from megatron.training.stop import StopRequests
from megatron.training.task import Task

# After so many gradients in a row that are not finite, training does not recover by itself.
MOST_BAD_STEPS = 10


@dataclasses.dataclass
class Progress:
    """How far a run has come. Saved with every checkpoint."""

    history: History
    iteration: int = 0
    consumed_samples: int = 0
    evaluation_due: bool = False  # the run stopped where it should have evaluated
    bad_steps: int = 0  # the last so many reported iterations had gradients that were not finite


class Clock:
    """Measures training since it was last taken, without the time in `paused`."""

    def __init__(self) -> None:
        self.begin = time.perf_counter()
        self.iterations = self.last = 0

    def count(self, samples: int) -> None:
        """An iteration over so many samples is done."""
        self.iterations += 1
        self.last = samples

    def take(self) -> tuple[float, int]:
        """Seconds and iterations since this was last called."""
        now = time.perf_counter()
        taken = now - self.begin, self.iterations
        self.begin, self.iterations = now, 0
        return taken

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time that is not training: evaluations, checkpoints."""
        before = time.perf_counter()
        yield
        self.begin += time.perf_counter() - before


@contextmanager
def manual_gc(config: TrainingConfig) -> Iterator[None]:
    """With --manual-gc, Python collects no garbage by itself within the block."""
    if config.manual_gc:
        gc.collect()
        gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def garbage_collected(config: TrainingConfig) -> Iterator[None]:
    """An evaluation, with --manual-gc: what training left is collected before it, and what it leaves after it."""
    collects = config.manual_gc and config.manual_gc_eval
    if collects:
        gc.collect()
    yield
    if collects:
        gc.collect(generation=0)


@dataclasses.dataclass(kw_only=True)
class Trainer:
    """A run, as `pretrain` has set it up."""

    config: RunConfig
    task: Task
    mesh: Mesh
    tokenizer: Tokenizer
    padded_vocab_size: int
    engine: Engine
    schedule: Schedule
    batch_schedule: BatchSchedule
    peak: Peak
    train_iters: int
    train_samples: int  # that the order of the training data was made for
    datasets: dict[str, Dataset]  # by "train", "validation" and "test"; those there are
    eval_tasks: list[ZeroShotTask]
    saver: Saver
    reporter: Reporter
    progress: Progress
    sound: int = 0  # samples up to which no step is known to have been a fault
    length_flags: ClassVar[str] = "--train-iters or --train-samples"
    evaluates_again: ClassVar[bool] = False  # when nothing is left to train

    def train(self, stop: StopRequests) -> str | None:
        """Train to the last iteration, or until `stop` says so.

        Returns:
            Why training stopped before its end; None if it came to it.
        """
        progress, clock = self.progress, Clock()
        self.sound = progress.consumed_samples
        batches = train_batches(
            self.datasets["train"],
            self.config.data,
            consumed_samples=progress.consumed_samples,
            ahead=self.batch_schedule.most_microbatches,
            **self.loader_arguments(),
        )
        if progress.evaluation_due:
            self.evaluate_in_between()
        first = progress.iteration + 1
        iterations = range(first, self.train_iters + 1)
        with Profiler(self.config, self.engine, iterations=iterations, say=self.reporter.say) as profiler:
            while progress.iteration < self.train_iters:
                clock.count(self.step(batches))
                if self.due(self.config.training.manual_gc_interval):
                    gc.collect()
                profiler.advance(progress.iteration)
                end = progress.iteration == self.train_iters
                if end or self.due(self.config.logging.log_interval):
                    self.report(clock)
                if progress.iteration == first:
                    self.reporter.say(memory_lines(self.mesh, first))
                if self.due(self.config.training.check_weight_replicas_interval):
                    with clock.paused():
                        check_replicas(self.engine.buffer)
                reason = stop.reason(progress.iteration)
                self.saver.check()
                progress.evaluation_due = end or self.due(self.config.training.eval_interval)
                with clock.paused():
                    self.pause(goes_on=not end and reason is None)
                if reason is not None and not end:
                    return reason
        return None

    def pause(self, *, goes_on: bool) -> None:
        """Evaluate and save where that is due. What is due at the end, `finish` does; what is due when the run stops,
        the run that resumes does."""
        if self.progress.evaluation_due and goes_on:
            self.evaluate_in_between()
        if not goes_on or self.due(self.config.checkpoint.save_interval):
            self.save()

    def evaluate_in_between(self) -> None:
        """Evaluate where --eval-interval says so."""
        if self.due(self.config.training.eval_interval):
            self.collect()
            with garbage_collected(self.config.training):
                self.evaluate("validation", f"iteration {self.progress.iteration}")
                self.evaluate_tasks(f"iteration {self.progress.iteration}")
        self.progress.evaluation_due = False

    def finish(self) -> None:
        """Evaluate at the end of training, unless an earlier try has; or with --skip-train."""
        if self.config.training.skip_train:
            self.evaluate("validation", f"iteration {self.progress.iteration} on validation set")
            self.evaluate("test", f"iteration {self.progress.iteration} on test set")
            self.evaluate_tasks(f"iteration {self.progress.iteration}")
        elif self.progress.evaluation_due:
            self.evaluate("validation", "the end of training for val data")
            self.evaluate("test", "the end of training for test data")
            self.evaluate_tasks("the end of training")
            self.mark_evaluated()

    def mark_evaluated(self) -> None:
        """Note in the last checkpoint that the evaluation at the end is done."""
        if self.config.checkpoint.save is not None and self.mesh.is_first:
            mark_evaluated(Path(self.config.checkpoint.save), self.progress.iteration)

    def due(self, interval: int | None) -> bool:
        """Whether something that is done every `interval` iterations, if at all, is to be done now."""
        return bool(interval) and self.progress.iteration % interval == 0

    def loader_arguments(self) -> dict[str, Any]:
        """What every loader of this process has in common."""
        return {
            "micro_batch_size": self.config.training.micro_batch_size,
            "dp_rank": self.mesh.dp.rank,
            "dp_size": self.mesh.dp.size,
            "eod": self.tokenizer.eod if self.config.data.needs_eod else None,
            "pin_memory": self.mesh.device.type == "cuda",
        }

    def step(self, batches: Iterator[Batch]) -> int:
        """One iteration: a global batch, a step of the optimizer. Gives the number of samples."""
        progress, consumed = self.progress, self.progress.consumed_samples
        losses, stats = self.engine.train_step(
            batches,
            num_microbatches=self.batch_schedule.num_microbatches(consumed),
            consumed_samples=consumed,
            lr=self.schedule.lr(consumed),
            weight_decay=self.schedule.weight_decay(consumed),
        )
        batch_size = self.batch_schedule.batch_size(consumed)
        progress.iteration += 1
        progress.consumed_samples += batch_size
        progress.history.add(progress.iteration, progress.consumed_samples, losses, stats)
        self.reporter.advance()
        return batch_size

    def collect(self) -> None:
        """Learn the values of the iterations since this was last called. Every process must take part.

        Raises:
            TrainingFault: a gradient was not finite, and that is to stop the run.
        """
        for row in self.progress.history.collect(self.mesh):
            if is_bad(row) and self.engine.optimizer.gate.stops:
                stop_on_non_finite(self, row["iteration"], self.sound)
            self.sound = row["consumed samples"]

    def report(self, clock: Clock) -> None:
        """Report the iterations since the last report; stop if too many of the last could not be used."""
        progress = self.progress
        self.collect()  # waits for the device, so before the clock is read
        seconds, iterations = clock.take()
        rows, progress.history.rows = progress.history.rows, []
        times = self.times(ITERATION, iterations)
        tokens, flops, exact_flops = self.work()
        peak = self.mesh.world.size * seconds * self.peak.flops
        interval = Interval(
            rows=rows,
            loss_names=self.task.loss_names,
            train_iters=self.train_iters,
            # As NVIDIA's log has it: the learning rate of the step to come.
            lr=self.schedule.lr(progress.consumed_samples),
            batch_size=clock.last,
            seconds=seconds / iterations,
            tokens_per_second=tokens / seconds,
            tflops=flops / seconds / self.mesh.world.size / 1e12,
            mfu=flops / peak,
            hfu=exact_flops / peak,
            params_norm=self.params_norm(),
            memory=most_memory(self.mesh) if self.config.logging.log_memory_to_tensorboard else {},
            times=times if self.config.logging.log_timers_to_tensorboard else {},
        )
        self.reporter.training(interval)
        self.tell(times)
        for row in rows:
            progress.bad_steps = progress.bad_steps + 1 if is_bad(row) else 0
            if progress.bad_steps >= MOST_BAD_STEPS:
                raise TrainingFault(
                    f"{progress.bad_steps} gradients in a row, up to iteration {row['iteration']}, were not finite; "
                    "they changed no weights. Continue from the last checkpoint with a lower --lr or a longer warm-up"
                )

    def work(self) -> tuple[float, float, float]:
        """Tokens, padding among them, and floating-point operations by the paper's count and by the exact one since
        this was last called, of all replicas. Every process must take part."""
        samples, self.engine.samples = self.engine.samples, collections.Counter()
        sums = torch.zeros(3, dtype=torch.float64)
        for (length, vocab_positions), count in samples.items():
            shape = {
                "seq_length": length,
                "padded_vocab_size": self.padded_vocab_size,
                "vocab_positions": vocab_positions,
            }
            flops = flops_per_sample(self.config.model, **shape)
            exact = exact_flops_per_sample(
                self.config.model,
                **shape,
                causal=self.task.causal,
                recompute=self.engine.recompute,
                chunks=[len(chunk.layers) for stage in self.engine.stages for chunk in stage],
            )
            sums += count * torch.tensor([length, flops, exact], dtype=torch.float64)
        tokens, flops, exact = all_reduce_sum(sums.to(self.mesh.device), self.mesh.dp).tolist()
        return tokens, flops, exact

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Time what is done now and then, and tell at once."""
        with self.engine.timers(phase):
            yield
        self.tell(self.times(BETWEEN))

    def times(self, phases: Iterable[str], iterations: int = 1) -> dict[str, dict[int, float]]:
        """Seconds of each phase by rank, per iteration, if --timing-log-level asks for them. Every process must take
        part."""
        times = self.engine.timers.take(phases, self.mesh.world)
        return {phase: {r: t / iterations for r, t in ranks.items()} for phase, ranks in times.items()}

    def tell(self, times: dict[str, dict[int, float]]) -> None:
        if times:
            self.reporter.say(times_text(times, self.config.logging.timing_log_option))

    def params_norm(self) -> float | None:
        """L2 norm of all parameters, if it is to be logged. Every process must take part."""
        buffer = self.engine.buffer
        return buffer.norm(buffer.masters).item() if self.config.logging.log_params_norm else None

    def evaluate(self, split: str, where: str) -> None:
        """Evaluate on the first samples of a split, the same ones each time, and report the losses.

        Without data of that split there is nothing to do.
        """
        if split not in self.datasets:
            return
        samples = range(self.config.training.eval_iters * self.batch_schedule.global_batch_size)
        batches = eval_batches(
            self.datasets[split], self.config.data, samples=samples, **self.loader_arguments()
        )
        with self.timed("evaluate"):
            losses = self.engine.evaluate(batches)
        self.reporter.evaluation(
            where, split, losses, self.progress.iteration, self.progress.consumed_samples
        )

    def evaluate_tasks(self, where: str) -> None:
        """Run the tasks of --eval-tasks, and report what they give. Every process must take part."""
        for task in self.eval_tasks:
            batches = make_batches(
                task,
                micro_batch_size=self.config.training.micro_batch_size,
                dp=self.mesh.dp,
                multiple=self.config.parallel.length_multiple,
            )
            with self.timed("evaluate"):
                (found,), (counted,) = self.engine.measure(batches, measure_of(task))
            assert counted == task.count
            results = task.results(found)
            self.reporter.measured(
                task.line(results, f" at {where}"),
                {f"{task.name} {name}": value for name, value in results.items()},
                self.progress.iteration,
                self.progress.consumed_samples,
            )

    def save(self) -> None:
        """Save a checkpoint of where the run stands, if it saves any. Every process must take part."""
        if self.config.checkpoint.save is not None:
            self.collect()
            if self.config.training.check_weight_replicas_interval is not None:
                check_replicas(self.engine.buffer)  # else the file would hold good and bad weights
            with self.timed("save-checkpoint"):
                self.saver.save(self.state())

    def state(self) -> dict[str, Any]:
        """All of a checkpoint that is not tensors, as JSON has it; a loss that is not finite is null."""
        progress, optimizer = self.progress, self.engine.optimizer
        rows = [{k: v if math.isfinite(v) else None for k, v in row.items()} for row in progress.history.rows]
        return {
            "task": self.task.name,
            "iteration": progress.iteration,
            "consumed_samples": progress.consumed_samples,
            "train_samples": self.train_samples,
            "evaluation_due": progress.evaluation_due,
            "bad_steps": progress.bad_steps,
            "history": rows,
            "spike_window": optimizer.gate.state(),
            "loss_scaler": None if optimizer.scaler is None else optimizer.scaler.state(),
            "vocab_size": self.tokenizer.vocab_size,
            "padded_vocab_size": self.padded_vocab_size,
            "schedule": dataclasses.asdict(self.schedule),
            "operations": list(self.engine.ops.kinds),
            "config": dataclasses.asdict(self.config),
            "versions": {"megatron": __version__, "torch": str(torch.__version__)},
        }
