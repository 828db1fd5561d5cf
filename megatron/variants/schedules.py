"""Pipeline schedules other than 1F1B whose backward passes are whole.

GPipe, arXiv 1811.06965; the interleaved one, 2104.04473 section 2.2; breadth-first, 2211.05953 section 4.
"""

from __future__ import annotations

from megatron.errors import InputError
from megatron.flags import either
from megatron.parallel.schedules import SPLIT, Backward, Compute, Forward, alternate, forward_only
from megatron.parallel.stages import split_layers
from megatron.training.batch_size import BatchSchedule
from megatron.training.config import RunConfig


def gpipe(stages: int, chunks: int, microbatches: int) -> list[list[Compute]]:
    """All forwards, then all backwards: every rank holds the activations of all microbatches at once."""
    assert chunks == 1
    return [
        [*forwards, *(Backward(f.microbatch, f.chunk) for f in forwards)]
        for forwards in forward_only(stages, chunks, microbatches)
    ]


def breadth_first(stages: int, chunks: int, microbatches: int) -> list[list[Compute]]:
    """Breadth-first (2211.05953 section 4): all microbatches through one chunk after another, then all of them back.

    The bubble is that of the interleaved schedule, for any number of microbatches from `stages` on. Every rank holds
    the activations of all microbatches, but a chunk's gradients are complete as soon as it has run backward.
    """
    return [
        [
            *(Forward(microbatch, chunk) for chunk in range(chunks) for microbatch in range(microbatches)),
            *(
                Backward(microbatch, chunk)
                for chunk in reversed(range(chunks))
                for microbatch in range(microbatches)
            ),
        ]
        for _ in range(stages)
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


def check_schedule(config: RunConfig, batches: BatchSchedule) -> None:
    """Check that a run fits its pipeline schedule.

    Raises:
        InputError: names the flags, and what to do.
    """
    parallel, schedule = config.parallel, config.parallel.pipeline_schedule
    stages, name = parallel.pipeline_model_parallel_size, f"--pipeline-schedule: {schedule}"
    if parallel.v_shaped:
        chunks = len(split_layers(parallel, config.model.num_layers)[0])
        if chunks != 2:
            one = ", or leave it out for one chunk" if schedule == "auto" else ""
            raise InputError(
                f"{name} has two chunks on each of {stages} stages, but {chunks} are given; set "
                f"--num-layers-per-virtual-pipeline-stage to --num-layers / {2 * stages}{one}"
            )
    unit = batches.micro_batch_size * batches.data_parallel_size
    for size in batches.sizes() if schedule == "dualpipe-v" else ():
        if size // unit < 2 * stages:
            raise InputError(
                f"{name} needs {2 * stages} microbatches, two for each stage; {batches.source(size)} {size} makes "
                f"{size // unit}; use zb-v, or at least {2 * stages * unit}"
            )
    if schedule not in SPLIT:
        return
    if parallel.overlap_grad_reduce:
        raise InputError(
            f"{name} does not go with --overlap-grad-reduce, since weight gradients are complete only at the end of a "
            "step; leave it out"
        )
    import torch  # not at the top: the command line knows the schedules before

    ops, gpu = config.ops, config.training.device != "cpu" and torch.cuda.is_available()
    if ops.ops_backend == "layers" or (gpu and ops.torch_compile and ops.ops_backend != "plain"):
        raise InputError(
            f"{name} splits the backward pass, which layers that are compiled as a whole do not; use --ops-backend "
            "plain"
        )


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
