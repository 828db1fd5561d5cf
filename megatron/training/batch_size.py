"""The global batch size of each step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from megatron.errors import InputError
from megatron.flags import either
from megatron.training.config import RunConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchSchedule:
    """The global batch size as a function of the samples consumed: constant here, not in plug-ins' subclasses.

    Attributes:
        global_batch_size: samples in a step, at the end of training if the size changes.
        micro_batch_size: samples in a forward and backward pass of one replica.
        data_parallel_size: number of replicas.

    Raises:
        InputError: a batch size does not divide into microbatches on all replicas.
    """

    global_batch_size: int
    micro_batch_size: int
    data_parallel_size: int

    def __post_init__(self) -> None:
        step = self.micro_batch_size * self.data_parallel_size
        for size in self.sizes():
            if size % step:
                raise InputError(
                    f"{self.source(size)} {size} is not a multiple of {step}, the --micro-batch-size of "
                    f"{self.micro_batch_size} times {self.data_parallel_size} data-parallel "
                    f"replica{'' if self.data_parallel_size == 1 else 's'}; the nearest is "
                    f"{either(n for n in (size // step * step, size // step * step + step) if n)}"
                )

    @property
    def max_microbatches(self) -> int:
        """Microbatches on each replica in the largest step."""
        return self.global_batch_size // (self.micro_batch_size * self.data_parallel_size)

    def batch_size(self, consumed: int) -> int:
        """Samples in the step that starts after `consumed` samples."""
        return self.global_batch_size

    def num_microbatches(self, consumed: int) -> int:
        """Microbatches on each replica in the step that starts after `consumed` samples."""
        return self.batch_size(consumed) // (self.micro_batch_size * self.data_parallel_size)

    def iterations(self, train_samples: int, consumed: int = 0) -> int:
        """Number of whole steps from `consumed` to `train_samples` samples."""
        return max(0, train_samples - consumed) // self.global_batch_size

    def sizes(self) -> Sequence[int]:
        """Every batch size of the run."""
        return [self.global_batch_size]

    def source(self, size: int) -> str:
        """The flag that a batch size comes from, for messages."""
        return "--global-batch-size"


# Functions that replace the constant schedule if the flags ask for it. Filled by `megatron.plugins`.
BATCH_SCHEDULES: list[Callable[[RunConfig, BatchSchedule], BatchSchedule]] = []


def make_batch_schedule(config: RunConfig, data_parallel_size: int) -> BatchSchedule:
    """The batch schedule of a run."""
    training = config.training
    schedule = BatchSchedule(
        global_batch_size=training.global_batch_size or training.micro_batch_size * data_parallel_size,
        micro_batch_size=training.micro_batch_size,
        data_parallel_size=data_parallel_size,
    )
    for change in BATCH_SCHEDULES:
        schedule = change(config, schedule)
    return schedule
