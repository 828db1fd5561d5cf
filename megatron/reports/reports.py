"""Reports beside the log: writers, and the progress bar."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import TracebackType

from tqdm import tqdm

from megatron.errors import InputError
from megatron.flags import flag_name
from megatron.parallel.collectives import raise_on_all_ranks
from megatron.parallel.mesh import Mesh
from megatron.recipes.length import LengthConfig
from megatron.reports.config import ReportConfig
from megatron.reports.services import MLflow, WeightsAndBiases
from megatron.reports.writers import CONFIGURATION, MetricsFile, TensorBoard, Writer
from megatron.settings.data_tokenizer import DataTokenizerConfig
from megatron.settings.tokenizer import FIELDS
from megatron.training.config import RunConfig
from megatron.training.loop import Hook, Trainer
from megatron.training.report import EvalResult, Interval

WRITERS: list[type[Writer]] = [MetricsFile, TensorBoard, WeightsAndBiases, MLflow]


class Reports(Hook):
    """Hands the values of training and evaluations to the writers that the flags ask for.

    Attributes:
        writers: of the run. Other hooks write texts to them.
        by_rank: the newest values by rank, by name of a quantity and of a part, which other hooks set.
    """

    writers: Writers

    def __init__(self) -> None:
        self.by_rank: dict[str, dict[str, dict[int, float]]] = {}

    @contextmanager
    def during_run(self, trainer: Trainer) -> Iterator[None]:
        state = trainer.state
        with ExitStack() as contexts:
            with raise_on_all_ranks(trainer.mesh.world, InputError):
                self.writers = contexts.enter_context(Writers(trainer.config, trainer.mesh, trainer.log))
                self.writers.start(
                    state.iteration, state.consumed_samples, evaluation_due=state.evaluation_due
                )
            self.writers.text(CONFIGURATION, config_text(trainer.config), state.iteration)
            yield
            if self.by_rank:
                self.writers.by_rank(self.by_rank, state.iteration)

    def before_save(self, trainer: Trainer) -> None:
        self.writers.checkpoint(trainer.state.iteration)

    def after_report(self, trainer: Trainer, interval: Interval) -> None:
        self.writers.training(interval)

    def after_evaluation(self, trainer: Trainer, result: EvalResult) -> None:
        self.writers.evaluation(result.values, trainer.state.iteration, trainer.state.consumed_samples)


class Writers:
    """The writers of a run, a context manager that closes them. There are none except on the first process."""

    def __init__(self, config: RunConfig, mesh: Mesh, log: Callable[[str], None]) -> None:
        """Raise `InputError` if a writer's package is not installed."""
        kinds = WRITERS if mesh.is_first else []
        self.log = log
        self.writers = [writer for kind in kinds if (writer := kind.make(config)) is not None]

    def start(self, iteration: int, samples: int, *, evaluation_due: bool = False) -> None:
        """Open the writers after `iteration`, without what an earlier run reported of anything to come."""
        for writer in self.writers:
            writer.start(iteration, samples, evaluation_due=evaluation_due)

    def training(self, interval: Interval) -> None:
        """Write an interval of training."""
        self._call_each(lambda writer: writer.training(interval))

    def evaluation(self, values: dict[str, float], iteration: int, samples: int) -> None:
        """Write values of an evaluation by name."""
        self._call_each(lambda writer: writer.evaluation(values, iteration, samples))

    def checkpoint(self, iteration: int) -> None:
        """Take note of a checkpoint."""
        self._call_each(lambda writer: writer.checkpoint(iteration))

    def by_rank(self, values: dict[str, dict[str, dict[int, float]]], iteration: int) -> None:
        """Write the newest values by rank."""
        self._call_each(lambda writer: writer.by_rank(values, iteration))

    def text(self, tag: str, text: str, iteration: int) -> None:
        """Write a text under a tag."""
        self._call_each(lambda writer: writer.text(tag, text, iteration))

    def __enter__(self) -> Writers:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: object, __: TracebackType | None) -> None:
        self._call_each(lambda writer: writer.close(failed=kind is not None))

    def _call_each(self, call: Callable[[Writer], None]) -> None:
        """Call each writer. One that fails, as on a full disk, is left out from then on: a run outlives its logs."""
        for writer in list(self.writers):
            try:
                call(writer)
            except OSError as error:
                self.writers.remove(writer)
                self.log(f"warning: {writer.flag}: {error.strerror}; the run continues without it")


def config_text(config: RunConfig) -> str:
    """The flags of a run that differ from their defaults, as a file for --config.

    Values that --train-tokens, --train-epochs and --tokenizer stand for are left out.
    """
    lines, length = [], config.plugin(LengthConfig)
    derived = set() if config.plugin(DataTokenizerConfig).tokenizer is None else set(FIELDS)
    if length.train_tokens is not None or length.train_epochs is not None:
        derived.add("train_samples")
    for section in config.sections:
        for field in dataclasses.fields(section):
            value = getattr(section, field.name)
            if "flag" in field.metadata and value != field.default and field.name not in derived:
                # A switch has the name of what it does, as no-progress, and is on.
                shown = json.dumps(isinstance(value, bool) or value)
                lines.append(f"{flag_name(field).removeprefix('--')}: {shown}\n")
    return "".join(lines)


class ProgressBar(Hook):
    """Shows the iterations of a run on a terminal (--no-progress)."""

    @contextmanager
    def during_run(self, trainer: Trainer) -> Iterator[None]:
        shown = trainer.log.active and trainer.config.plugin(ReportConfig).progress and sys.stderr.isatty()
        done, total = trainer.state.iteration, trainer.train_iters
        with tqdm(
            total=total, initial=done, unit="it", dynamic_ncols=True, smoothing=0.1, disable=not shown
        ) as self.bar:
            write = trainer.log.write
            if shown:
                trainer.log.write = tqdm.write
            try:
                yield
            finally:
                trainer.log.write = write

    def after_step(self, trainer: Trainer) -> None:
        with suppress(OSError):  # the terminal is gone
            self.bar.update()
