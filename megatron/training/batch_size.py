"""The global batch size of each step, with its ramp-up."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from megatron.errors import InputError
from megatron.flags import either
from megatron.training.config import TrainingConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchSchedule:
    """The global batch size by samples consumed: constant, or ramped up.

    Attributes:
        global_batch_size: samples in a step after the ramp-up.
        micro_batch_size: samples in a forward and backward pass of one replica.
        data_parallel_size: number of replicas.
        rampup: START, INCREMENT and SAMPLES of --rampup-batch-size: the batch grows from START by INCREMENT at a time,
            at even intervals, and reaches `global_batch_size` after SAMPLES samples.

    Raises:
        InputError: a batch size of the ramp-up does not divide into microbatches on all replicas, or INCREMENT does
            not lead from START to `global_batch_size`.
    """

    global_batch_size: int
    micro_batch_size: int
    data_parallel_size: int
    rampup: Sequence[int] | None = None

    @classmethod
    def from_config(cls, config: TrainingConfig, data_parallel_size: int) -> BatchSchedule:
        return cls(
            global_batch_size=config.global_batch_size or config.micro_batch_size * data_parallel_size,
            micro_batch_size=config.micro_batch_size,
            data_parallel_size=data_parallel_size,
            rampup=config.rampup_batch_size,
        )

    def __post_init__(self) -> None:
        if self.rampup is not None:
            self._check_rampup(self.rampup)
        step = self.micro_batch_size * self.data_parallel_size
        for size in self.sizes():
            if size % step:
                source = (
                    "--global-batch-size"
                    if size == self.global_batch_size
                    else f"--rampup-batch-size {_words(self.rampup or ())}: its batch size"
                )
                raise InputError(
                    f"{source} {size} is not a multiple of {step}, the --micro-batch-size of "
                    f"{self.micro_batch_size} times {self.data_parallel_size} data-parallel "
                    f"replica{'' if self.data_parallel_size == 1 else 's'}; the nearest is "
                    f"{either(n for n in (size // step * step, size // step * step + step) if n)}"
                )

    @property
    def max_microbatches(self) -> int:
        """Microbatches on each replica in a step after the ramp-up."""
        return self.global_batch_size // (self.micro_batch_size * self.data_parallel_size)

    def batch_size(self, consumed: int) -> int:
        """Samples in the step that starts after `consumed` samples."""
        if self.rampup is None or consumed > self.rampup[2]:
            return self.global_batch_size
        start, increment, samples = self.rampup
        # Floating point, so that the size changes at the same samples as in Megatron-LM.
        samples_per_increment = samples / ((self.global_batch_size - start) // increment)
        return start + int(consumed / samples_per_increment) * increment

    def num_microbatches(self, consumed: int) -> int:
        """Microbatches on each replica in the step that starts after `consumed` samples."""
        return self.batch_size(consumed) // (self.micro_batch_size * self.data_parallel_size)

    def iterations(self, train_samples: int, consumed: int = 0) -> int:
        """Number of whole steps from `consumed` to `train_samples` samples."""
        steps = 0
        while self.batch_size(consumed) < self.global_batch_size:
            consumed += self.batch_size(consumed)
            if consumed > train_samples:
                return steps
            steps += 1
        return steps + max(0, train_samples - consumed) // self.global_batch_size

    def sizes(self) -> range:
        """Every batch size from the first step to the end of the ramp-up."""
        if self.rampup is None:
            return range(self.global_batch_size, self.global_batch_size + 1)
        return range(self.rampup[0], self.global_batch_size + 1, self.rampup[1])

    def _check_rampup(self, rampup: Sequence[int]) -> None:
        flag = f"--rampup-batch-size {_words(rampup)}:"
        if len(rampup) != 3:
            raise InputError(f"{flag} needs three numbers, START INCREMENT SAMPLES")
        start, increment, samples = rampup
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


def _words(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers))
