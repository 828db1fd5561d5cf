"""A global batch that grows at the start of training (--rampup-batch-size)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from megatron.errors import InputError
from megatron.recipes.config import RampUpConfig
from megatron.training.batch_size import BatchSchedule
from megatron.training.config import RunConfig


def with_rampup(config: RunConfig, schedule: BatchSchedule) -> BatchSchedule:
    """Add the ramp-up of a run, if it has one."""
    rampup = config.plugin(RampUpConfig).rampup_batch_size
    return schedule if rampup is None else RampUp(**vars(schedule), rampup=rampup)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RampUp(BatchSchedule):
    """A batch that grows from START by INCREMENT at a time, at even intervals, up to `global_batch_size`.

    Attributes:
        rampup: START, INCREMENT and SAMPLES, the samples after which the batch has `global_batch_size`.

    Raises:
        InputError: also if INCREMENT does not lead from START to `global_batch_size`.
    """

    rampup: Sequence[int]

    def __post_init__(self) -> None:
        self._check()
        super().__post_init__()

    def batch_size(self, consumed: int) -> int:
        start, increment, samples = self.rampup
        if consumed > samples:
            return self.global_batch_size
        # Floating point, so that the size changes at the same samples as in Megatron-LM.
        samples_per_increment = samples / ((self.global_batch_size - start) // increment)
        return start + int(consumed / samples_per_increment) * increment

    def iterations(self, train_samples: int, consumed: int = 0) -> int:
        steps = 0
        while self.batch_size(consumed) < self.global_batch_size:
            consumed += self.batch_size(consumed)
            if consumed > train_samples:
                return steps
            steps += 1
        return steps + super().iterations(train_samples, consumed)

    def sizes(self) -> Sequence[int]:
        return range(self.rampup[0], self.global_batch_size + 1, self.rampup[1])

    def source(self, size: int) -> str:
        if size == self.global_batch_size:
            return super().source(size)
        return f"--rampup-batch-size {self._words}: its batch size"

    @property
    def _words(self) -> str:
        return " ".join(map(str, self.rampup))

    def _check(self) -> None:
        flag = f"--rampup-batch-size {self._words}:"
        if len(self.rampup) != 3:
            raise InputError(f"{flag} needs three numbers, START INCREMENT SAMPLES")
        start, increment, samples = self.rampup
        if min(start, increment, samples) < 1:
            raise InputError(f"{flag} START, INCREMENT and SAMPLES must be at least 1")
        if start >= self.global_batch_size:
            raise InputError(
                f"{flag} START must be less than --global-batch-size {self.global_batch_size}; "
                "without a ramp, leave the flag out"
            )
        if (self.global_batch_size - start) % increment:
            raise InputError(
                f"{flag} steps of {increment} do not lead from {start} to --global-batch-size "
                f"{self.global_batch_size}; INCREMENT must divide their difference, {self.global_batch_size - start}"
            )
