"""The training loop."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from megatron import __version__
from megatron.checkpoint.checkpoint import save_checkpoint
from megatron.data.loader import eval_batches, train_batches
from megatron.flags import TrainingFault
from megatron.optim.buffer import ParamBuffer
from megatron.optim.optimizer import Optimizer
from megatron.optim.schedule import Schedule
from megatron.parallel.collectives import barrier
from megatron.parallel.mesh import Mesh
from megatron.tokenizer import Tokenizer
from megatron.training.batch_size import BatchSchedule
from megatron.training.config import RunConfig
from megatron.training.costs import flops_per_sample
from megatron.training.report import History, Interval, Reporter
from megatron.training.step import evaluate, train_step
from megatron.training.stop import StopRequests
from megatron.training.task import Batch, Task


@dataclasses.dataclass
class Progress:
    """How far a run has come. Saved with every checkpoint."""

    iteration: int
    consumed_samples: int
    history: History


class Clock:
    """Measures iterations: seconds and number since they were last taken, without the time in `paused`."""

    def __init__(self) -> None:
        self.begin = time.perf_counter()
        self.iterations = 0

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


@dataclasses.dataclass(kw_only=True)
class Trainer:
    """A run, as `pretrain` has set it up."""

    config: RunConfig
    task: Task
    mesh: Mesh
    tokenizer: Tokenizer
    padded_vocab_size: int
    model: nn.Module
    buffer: ParamBuffer
    optimizer: Optimizer
    schedule: Schedule
    batch_schedule: BatchSchedule
    train_iters: int
    datasets: dict[str, Dataset]  # by "train", "validation" and "test"; those there are
    reporter: Reporter
    progress: Progress

    def train(self, stop: StopRequests) -> str | None:
        """Train to the last iteration, or until `stop` says so.

        Returns:
            Why training stopped before its end; None if it came to it.
        """
        progress, clock = self.progress, Clock()
        batches = train_batches(
            self.datasets["train"],
            self.config.data,
            consumed_samples=progress.consumed_samples,
            **self.loader_arguments(),
        )
        while progress.iteration < self.train_iters:
            self.step(batches)
            clock.iterations += 1
            if progress.iteration % self.config.logging.log_interval == 0:
                self.report(*clock.take())
            reason = stop.reason(progress.iteration)
            last = reason is not None or progress.iteration == self.train_iters
            with clock.paused():
                if (
                    self.config.training.eval_iters
                    and not last
                    and self.due(self.config.training.eval_interval)
                ):
                    self.evaluate("validation", f"iteration {progress.iteration}")
                if self.config.checkpoint.save and (last or self.due(self.config.checkpoint.save_interval)):
                    self.save()
            if reason is not None and progress.iteration < self.train_iters:
                return reason
        return None

    def due(self, interval: int | None) -> bool:
        """Whether something that is done every `interval` iterations, if at all, is to be done now."""
        return interval is not None and self.progress.iteration % interval == 0

    def loader_arguments(self) -> dict[str, Any]:
        """What every loader of this process has in common."""
        return {
            "micro_batch_size": self.config.training.micro_batch_size,
            "dp_rank": self.mesh.dp.rank,
            "dp_size": self.mesh.dp.size,
            "eod": self.tokenizer.eod if self.config.data.needs_eod else None,
            "pin_memory": self.mesh.device.type == "cuda",
        }

    def step(self, batches: Iterator[Batch]) -> None:
        """One iteration: a global batch, a step of the optimizer."""
        progress, consumed = self.progress, self.progress.consumed_samples
        losses, stats = train_step(
            self.model,
            self.task,
            batches,
            self.buffer,
            self.optimizer,
            self.mesh,
            num_microbatches=self.batch_schedule.num_microbatches(consumed),
            micro_batch_size=self.config.training.micro_batch_size,
            consumed_samples=consumed,
            seed=self.config.training.seed,
            lr=self.schedule.lr(consumed),
            weight_decay=self.schedule.weight_decay(consumed),
        )
        progress.iteration += 1
        progress.consumed_samples += self.batch_schedule.batch_size(consumed)
        progress.history.add(progress.iteration, progress.consumed_samples, losses, stats)
        self.reporter.advance()

    def report(self, seconds: float, timed: int) -> None:
        """Report the iterations since the last report; stop if not one of them could be used.

        Args:
            seconds: how long the last `timed` iterations took. After a resume there may be older ones.
        """
        progress = self.progress
        progress.history.collect(self.mesh)
        rows, progress.history.rows = progress.history.rows, []
        log_params = self.config.logging.log_params_norm
        batch_size = self.batch_schedule.batch_size(progress.consumed_samples)
        flops = flops_per_sample(
            self.config.model,
            seq_length=self.config.data.seq_length,
            padded_vocab_size=self.padded_vocab_size,
        )
        samples_per_second = batch_size * timed / seconds
        interval = Interval(
            rows=rows,
            loss_names=self.task.loss_names,
            train_iters=self.train_iters,
            # As NVIDIA's log has it: the learning rate of the step to come.
            lr=self.schedule.lr(progress.consumed_samples),
            batch_size=batch_size,
            seconds=seconds / timed,
            tokens_per_second=samples_per_second * self.config.data.seq_length,
            tflops=samples_per_second * flops / self.mesh.world.size / 1e12,
            params_norm=torch.linalg.vector_norm(self.buffer.master).item() if log_params else None,
        )
        self.reporter.training(interval)
        if interval.bad == len(rows):
            raise TrainingFault(
                f"not one of the {len(rows)} gradients up to iteration {progress.iteration} was finite; they "
                "changed no weights. Continue from the last checkpoint with a lower --lr or a longer warm-up"
            )

    def evaluate(self, split: str, where: str) -> None:
        """Evaluate on the first samples of a split, always the same ones, and report the losses.

        Without data of that split there is nothing to do.
        """
        if split not in self.datasets:
            return
        samples = range(self.config.training.eval_iters * self.batch_schedule.global_batch_size)
        batches = eval_batches(
            self.datasets[split], self.config.data, samples=samples, **self.loader_arguments()
        )
        losses = evaluate(self.model, self.task, batches, self.mesh)
        self.reporter.evaluation(
            where, split, losses, self.progress.iteration, self.progress.consumed_samples
        )

    def save(self) -> None:
        """Save a checkpoint of where the run stands. Every process must take part; the first one writes."""
        progress, saving = self.progress, self.config.checkpoint
        progress.history.collect(self.mesh)
        if self.mesh.is_first:
            state = {
                "task": self.task.name,
                "iteration": progress.iteration,
                "consumed_samples": progress.consumed_samples,
                "history": progress.history.rows,
                "vocab_size": self.tokenizer.vocab_size,
                "padded_vocab_size": self.padded_vocab_size,
                "schedule": dataclasses.asdict(self.schedule),
                "config": dataclasses.asdict(self.config),
                "versions": {"megatron": __version__, "torch": str(torch.__version__)},
            }
            save_checkpoint(
                Path(saving.save),
                state,
                buffer=self.buffer,
                optimizer=self.optimizer if saving.save_optim else None,
                tokenizer_files=self.tokenizer.files,
                keep_last=saving.keep_last,
            )
            self.reporter.say(f"saved checkpoint at iteration {progress.iteration} to {saving.save}")
        barrier(self.mesh.world)
