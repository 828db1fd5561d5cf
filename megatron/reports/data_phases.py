"""The phases of the training data, in the log and in every report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

from megatron.data.config import DataConfig
from megatron.reports.record import DATA_PHASE
from megatron.training.loop import Hook, Trainer
from megatron.training.report import Interval
from megatron.training.start import run_length
from megatron.variants.blend_flags import DataPhase, split_phases


class DataPhases(Hook):
    """Logs the data phases at the start of a run and when one begins, and adds the number of the phase to reports.

    Attributes:
        phases: of the training data; a run of one phase logs none.
    """

    def during_run(self, trainer: Trainer) -> AbstractContextManager[object]:
        self.phases = training_phases(trainer.config.data)
        state = trainer.state
        _, samples = run_length(
            trainer.config, trainer.batch_schedule, state.iteration, state.consumed_samples
        )
        if len(self.phases) > 1 and not trainer.config.training.skip_train:
            for line in describe_phases(self.phases, samples):
                trainer.log(line)
        return nullcontext()

    def after_step(self, trainer: Trainer) -> None:
        state = trainer.state
        before = phase_number(self.phases, state.consumed_samples - trainer.batch_size)
        if (now := phase_number(self.phases, state.consumed_samples)) != before:
            phase = self.phases[now - 1]
            trainer.log(
                f"data phase {now} from sample {phase.start + 1:,} on, in iteration {state.iteration}: "
                f"{' '.join(phase.words)}"
            )

    def before_report(self, trainer: Trainer, interval: Interval) -> None:
        if len(self.phases) > 1:
            interval.values[DATA_PHASE] = phase_number(self.phases, trainer.state.consumed_samples)


def training_phases(config: DataConfig) -> list[DataPhase]:
    """The phases of the training data; one if the flags name one blend, or none."""
    if config.data_path is not None:
        return split_phases(config.data_path, "--data-path")
    return split_phases(config.train_data_path or (), "--train-data-path")


def phase_number(phases: Sequence[DataPhase], consumed: int) -> int:
    """The number of the phase that the last of `consumed` samples belongs to, counted from 1."""
    return max(1, sum(phase.start < consumed for phase in phases))


def describe_phases(phases: Sequence[DataPhase], samples: int) -> Iterator[str]:
    """Yield a line on each phase of a run of `samples` samples."""
    ends = [*(phase.start for phase in phases[1:]), samples]
    for number, (phase, end) in enumerate(zip(phases, ends, strict=True), 1):
        first, last = phase.start + 1, min(end, samples)
        span = f"samples {first:,} to {last:,}" if first <= last else f"not reached in {samples:,} samples"
        yield f"data phase {number}: {span}: {' '.join(phase.words)}"
