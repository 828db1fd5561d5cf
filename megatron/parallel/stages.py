"""Layers of each pipeline stage (arXiv 2104.04473 section 2.2)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

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
            f"--num-layers-per-virtual-pipeline-stage {each}: chunks of {count_layers(each)} on {stages} stages "
            f"(--pipeline-model-parallel-size) do not make up --num-layers {num_layers}; choose "
            + (f"chunks of {either(fitting)}" if fitting else f"--num-layers a multiple of {stages}")
        )
    return num_layers // (stages * each)


def even_split(config: ParallelConfig, num_layers: int) -> list[int]:
    """Layers of each chunk of the model, all equal."""
    stages = config.pipeline_model_parallel_size
    chunks = stages * chunks_per_stage(config, num_layers)
    if num_layers % chunks:
        raise InputError(
            f"--pipeline-model-parallel-size: {stages} stages do not divide --num-layers {num_layers}; choose "
            f"{either(n for n in range(1, num_layers + 1) if num_layers % n == 0)}, or give the first or last stage "
            "another number by --decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers"
        )
    return [num_layers // chunks] * chunks


# By `ParallelConfig.layer_split`. `megatron.plugins` adds to them.
LAYER_SPLITS: dict[str, Callable[[ParallelConfig, int], list[int]]] = {"even": even_split}


def split_layers(config: ParallelConfig, num_layers: int) -> list[list[Chunk]]:
    """Split the layers into the chunks of each stage. Chunk c of stage p is the (c · P + p)-th of the model.

    Raises:
        InputError: the layers do not divide as the flags say.
    """
    stages, sizes = config.pipeline_model_parallel_size, LAYER_SPLITS[config.layer_split](config, num_layers)
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    parts = [
        Chunk(range(end - size, end), first=i == 0, last=i == len(sizes) - 1)
        for i, (size, end) in enumerate(zip(sizes, ends, strict=True))
    ]
    return [parts[stage::stages] for stage in range(stages)]


def count_layers(count: int) -> str:
    """A number of layers in words."""
    return f"{count} layer" if count == 1 else f"{count} layers"
