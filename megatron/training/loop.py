"""The training loop, and the hooks that extend it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch

from megatron import __version__
from megatron.checkpoint.checkpoint import mark_evaluated
from megatron.checkpoint.save import Saver
from megatron.data.batch import Batch
from megatron.data.dataset import Dataset
from megatron.data.loader import train_batches
from megatron.parallel.mesh import Mesh
from megatron.tokenizer import Tokenizer
from megatron.training.batch_size import BatchSchedule
from megatron.training.clock import Clock
from megatron.training.config import RunConfig
from megatron.training.engine import Engine
from megatron.training.report import EvalResult, Interval, Log
from megatron.training.state import TrainState
from megatron.training.stop import StopRequests
from megatron.training.task import Task


@dataclasses.dataclass(kw_only=True)
class Trainer:
    """A run, set up by `pretrain`.

    Attributes:
        datasets: by "train", "validation" and "test"; those there are.
        hooks: called in this order.
        batch_size: samples in the last step.
        stop_reason: reason to stop before the last iteration; None to go on.
        elapsed: seconds since the start after the last step, the same on every process.
    """

    config: RunConfig
    task: Task
    mesh: Mesh
    tokenizer: Tokenizer
    padded_vocab_size: int
    engine: Engine
    batch_schedule: BatchSchedule
    train_iters: int
    datasets: dict[str, Dataset]
    saver: Saver
    log: Log
    state: TrainState
    hooks: Sequence[Hook]
    clock: Clock = dataclasses.field(default_factory=Clock)
    batch_size: int = 0
    stop_reason: str | None = None
    elapsed: int = 0

    def run(self, stop: StopRequests) -> None:
        """Train unless nothing is left to train, then evaluate. `stop_reason` is set if training ended early."""
        with ExitStack() as contexts:
            for hook in self.hooks:
                contexts.enter_context(hook.during_run(self))
            if not self.is_done and not self.config.training.skip_train:
                self.train(stop)
            if self.stop_reason is None:
                for hook in self.hooks:
                    hook.at_end(self)

    def train(self, stop: StopRequests) -> None:
        """Train to the last iteration, or until `stop` or a hook gives a reason not to."""
        batches = train_batches(
            self.datasets["train"],
            self.config.data,
            consumed_samples=self.state.consumed_samples,
            ahead=self.batch_schedule.max_microbatches,
            **self.loader_arguments(),
        )
        with ExitStack() as contexts:
            contexts.enter_context(stop)
            for hook in self.hooks:
                contexts.enter_context(hook.during_training(self))
            for hook in self.hooks:
                hook.before_training(self)
            self.clock = Clock()
            while self.goes_on:
                self.step(batches)
                self.stop_reason = stop.reason()
                self.elapsed = stop.elapsed
                for hook in self.hooks:
                    hook.after_step(self)
        self.engine.optimizer.finish()
        if self.is_done:
            self.stop_reason = None

    def step(self, batches: Iterator[Batch]) -> None:
        """Train on one global batch."""
        state, consumed = self.state, self.state.consumed_samples
        losses, stats = self.engine.train_step(
            batches,
            num_microbatches=self.batch_schedule.num_microbatches(consumed),
            consumed_samples=consumed,
            lr=state.schedule.lr(consumed),
            weight_decay=state.schedule.weight_decay(consumed),
        )
        self.batch_size = self.batch_schedule.batch_size(consumed)
        state.iteration += 1
        state.consumed_samples += self.batch_size
        state.history.add(state.iteration, state.consumed_samples, losses, stats)
        self.clock.iterations += 1

    @property
    def is_done(self) -> bool:
        """True after the last iteration."""
        return self.state.iteration >= self.train_iters

    @property
    def goes_on(self) -> bool:
        """True if another step follows."""
        return not self.is_done and self.stop_reason is None

    def is_due(self, interval: int | None) -> bool:
        """True after every `interval` iterations; never for 0 and None."""
        return bool(interval) and self.state.iteration % (interval or 1) == 0

    def collect(self) -> None:
        """Fetch the values of the iterations since the last call. Waits for the device; every process must call it."""
        self.engine.optimizer.finish()
        rows = self.state.history.collect(self.mesh)
        for hook in self.hooks:
            hook.after_collect(self, rows)

    def save(self) -> None:
        """Save a checkpoint of the current iteration if the run has --save. Every process must call it."""
        if self.config.checkpoint.save is None:
            return
        self.collect()
        for hook in self.hooks:
            hook.before_save(self)
        with self.engine.phases("save-checkpoint"):
            self.saver.save(self.state_dict())

    def mark_evaluated(self) -> None:
        """Record in the newest checkpoint of --save, if it is this run's, that the final evaluation is done."""
        save, iteration = self.config.checkpoint.save, self.state.iteration
        if save is not None and self.mesh.is_first and self.saver.iteration == iteration:
            mark_evaluated(Path(save), iteration)

    def state_dict(self) -> dict[str, Any]:
        """Everything that a checkpoint holds beside tensors, as JSON."""
        return {
            "task": self.task.name,
            **self.state.state_dict(self.engine.optimizer),
            "operations": list(self.engine.ops.kinds),
            "vocab_size": self.tokenizer.vocab_size,
            "padded_vocab_size": self.padded_vocab_size,
            "config": dataclasses.asdict(self.config) | self.task.extra_config,
            "versions": {"megatron": __version__, "torch": str(torch.__version__)},
        }

    def report_evaluation(self, result: EvalResult) -> None:
        """Hand the results of an evaluation to the hooks, which log and write them."""
        for hook in self.hooks:
            hook.after_evaluation(self, result)

    def loader_arguments(self) -> dict[str, Any]:
        """Arguments that every data loader of this process has in common."""
        return {
            "micro_batch_size": self.config.training.micro_batch_size,
            "dp_rank": self.mesh.dp.rank,
            "dp_size": self.mesh.dp.size,
            "pin_memory": self.mesh.device.type == "cuda",
        }


class Hook:
    """Extends a run. Every process calls each hook at the same points, in the order of the trainer's list."""

    def during_run(self, trainer: Trainer) -> AbstractContextManager[object]:
        """Context of the whole run, from before the first step to after the last evaluation."""
        return nullcontext()

    def during_training(self, trainer: Trainer) -> AbstractContextManager[object]:
        """Context of the training steps."""
        return nullcontext()

    def before_training(self, trainer: Trainer) -> None:
        """Called before the first step."""

    def after_step(self, trainer: Trainer) -> None:
        """Called after every step. `trainer.stop_reason`, which it may set, is the reason to stop after this step."""

    def after_collect(self, trainer: Trainer, rows: list[dict[str, float]]) -> None:
        """Called when the values of iterations have arrived from the device."""

    def before_report(self, trainer: Trainer, interval: Interval) -> None:
        """Called before iterations are reported. It may add values."""

    def after_report(self, trainer: Trainer, interval: Interval) -> None:
        """Called when iterations have been reported."""

    def during_evaluation(self, trainer: Trainer) -> AbstractContextManager[object]:
        """Context of an evaluation between training steps."""
        return nullcontext()

    def evaluate(self, trainer: Trainer, where: str) -> None:
        """Called when an evaluation is due, beside the losses; `where` is for its heading."""

    def after_evaluation(self, trainer: Trainer, result: EvalResult) -> None:
        """Called when an evaluation has given results."""

    def before_save(self, trainer: Trainer) -> None:
        """Called before a checkpoint is written."""

    def at_end(self, trainer: Trainer) -> None:
        """Called after the last iteration, and with --skip-train in place of training."""
