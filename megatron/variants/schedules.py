"""Pipeline schedules other than 1F1B: GPipe, arXiv 1811.06965, and the interleaved one, 2104.04473 section 2.2."""

from __future__ import annotations

from megatron.errors import InputError
from megatron.flags import either
from megatron.parallel.schedules import Backward, Compute, alternate, forward_only
from megatron.training.batch_size import BatchSchedule
from megatron.training.config import RunConfig


def gpipe(stages: int, chunks: int, microbatches: int) -> list[list[Compute]]:
    """All forwards, then all backwards: every rank holds the activations of all microbatches at once."""
    assert chunks == 1
    return [
        [*forwards, *(Backward(f.microbatch, f.chunk) for f in forwards)]
        for forwards in forward_only(stages, chunks, microbatches)
    ]


def interleaved(stages: int, chunks: int, microbatches: int) -> list[list[Compute]]:
    """Interleaved 1F1B (2104.04473 section 2.2): several chunks per rank divide the bubble by their number.

    Rank p runs `2 * (stages - p - 1) + (chunks - 1) * stages` forwards before it alternates: it reaches its
    last chunk after `(chunks - 1) * stages` of them, and the gradient of that chunk's first microbatch comes
    back `2 * (stages - p - 1)` later. At its peak it holds one forward more than that.

    The microbatches divide into groups of `stages` (`check_full_groups`).
    """
    assert microbatches % stages == 0
    schedule = []
    for rank, forwards in enumerate(forward_only(stages, chunks, microbatches)):
        backwards = [Backward(f.microbatch, chunks - 1 - f.chunk) for f in forwards]
        warmup = 2 * (stages - rank - 1) + (chunks - 1) * stages
        schedule.append(alternate(forwards, backwards, warmup))
    return schedule


def check_full_groups(config: RunConfig, batches: BatchSchedule) -> None:
    """Check that the microbatches of every step of a run divide into groups for the interleaved schedule.

    Raises:
        InputError: names the flags, and the nearest batch sizes that fit.
    """
    stages = config.parallel.pipeline_model_parallel_size
    if config.parallel.pipeline_schedule != "interleaved":
        return
    unit = batches.micro_batch_size * batches.data_parallel_size
    for size in batches.sizes():
        if size // unit % stages:
            below = size // (unit * stages) * unit * stages
            raise InputError(
                f"--num-layers-per-virtual-pipeline-stage: the interleaved schedule needs a multiple of {stages} "
                f"microbatches, one for each stage; {batches.source(size)} {size} makes {size // unit}, and the "
                f"nearest is {either(n for n in (below, below + unit * stages) if n)}"
            )
