"""Layers of each pipeline stage (arXiv 2104.04473 section 2.2)."""

from __future__ import annotations

import dataclasses

from megatron.errors import InputError
from megatron.flags import either
from megatron.parallel.config import ParallelConfig


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Consecutive layers of the model on one rank, with the model's ends if it has them."""

    layers: range
    first: bool = True  # has the embedding
    last: bool = True  # has the final norm, output layer and loss


def chunks_per_stage(config: ParallelConfig, num_layers: int) -> int:
    """V, the chunks on each rank: 1 except with the interleaved schedule.

    Raises:
        InputError: the layers do not divide as the flags say.
    """
    stages, each = config.pipeline_model_parallel_size, config.num_layers_per_virtual_pipeline_stage
    if each is None:
        return 1
    if num_layers % (stages * each):
        fitting = [n for n in range(1, num_layers + 1) if num_layers % (stages * n) == 0]
        raise InputError(
            f"--num-layers-per-virtual-pipeline-stage {each}: chunks of {_layers(each)} on {stages} stages "
            f"(--pipeline-model-parallel-size) do not make up --num-layers {num_layers}; choose "
            + (f"chunks of {either(fitting)}" if fitting else f"--num-layers a multiple of {stages}")
        )
    return num_layers // (stages * each)


def split_layers(config: ParallelConfig, num_layers: int) -> list[list[Chunk]]:
    """Split the layers into the chunks of each stage. Chunk c of stage p is the (c · P + p)-th of the model.

    Raises:
        InputError: the layers do not divide as the flags say.
    """
    stages, chunks = config.pipeline_model_parallel_size, chunks_per_stage(config, num_layers)
    sizes = (
        [num_layers // (stages * chunks)] * (stages * chunks) if chunks > 1 else _sizes(config, num_layers)
    )
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    parts = [
        Chunk(range(end - size, end), first=i == 0, last=i == len(sizes) - 1)
        for i, (size, end) in enumerate(zip(sizes, ends, strict=True))
    ]
    return [parts[stage::stages] for stage in range(stages)]


def _sizes(config: ParallelConfig, num_layers: int) -> list[int]:
    """Layers of each stage if a stage is one chunk."""
    stages = config.pipeline_model_parallel_size
    uneven = {
        0: config.decoder_first_pipeline_num_layers,
        stages - 1: config.decoder_last_pipeline_num_layers,
    }
    given = {stage: layers for stage, layers in uneven.items() if layers is not None}
    if given:
        _check_uneven(given, stages, num_layers)
    elif num_layers % stages:
        raise InputError(
            f"--pipeline-model-parallel-size: {stages} stages do not divide --num-layers {num_layers}; choose "
            f"{either(n for n in range(1, num_layers + 1) if num_layers % n == 0)}, or give the first or last stage "
            "another number by --decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers"
        )
    others = stages - len(given)
    each = (num_layers - sum(given.values())) // others if others else 0
    return [given.get(stage, each) for stage in range(stages)]


def _check_uneven(given: dict[int, int], stages: int, num_layers: int) -> None:
    """Check that the layers of the first and last stage, as far as `given`, leave equal numbers to the others."""
    sum_, others = sum(given.values()), stages - len(given)
    flags = [f"--decoder-{'last' if stage else 'first'}-pipeline-num-layers" for stage in given]
    said = " and ".join(f"{flag} {layers}" for flag, layers in zip(flags, given.values(), strict=True))
    if others == 0:
        if sum_ != num_layers:
            raise InputError(
                f"{said}: the two stages hold {_layers(sum_)} of --num-layers {num_layers}; leave one of the two out"
            )
        return
    # A last stage without layers still has the output layer, and a first one the embedding.
    middle = stages > 2
    fitting = range(num_layers % others, num_layers + 1 - (others if middle else 0), others)
    if sum_ not in fitting:
        nearest = sorted(sorted(fitting, key=lambda n: abs(n - sum_))[:2])
        raise InputError(
            f"{said}: the other layers of --num-layers {num_layers} do not divide into the other {others} of "
            f"{stages} stages (--pipeline-model-parallel-size); choose "
            + (
                f"{'a sum of ' if len(given) > 1 else ''}{either(nearest)}"
                if nearest
                else f"at most {num_layers} stages"
            )
        )


def _layers(count: int) -> str:
    return f"{count} layer" if count == 1 else f"{count} layers"
