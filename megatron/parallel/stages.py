"""Layers of each pipeline stage (arXiv 2104.04473 section 2.2)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from megatron.errors import InputError
from megatron.flags import either
from megatron.parallel.config import ParallelConfig
from megatron.parallel.schedules import part_of


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Consecutive layers of the model on one rank, with the model's ends if it has them."""

    layers: range
    first: bool = True  # has the embedding
    last: bool = True  # has the final norm, output layer and loss
    v_shaped: bool = False  # one rank has the model's first and last chunk


def even_split(config: ParallelConfig, num_layers: int) -> list[int]:
    """Layers of each stage, all equal."""
    stages = config.pipeline_model_parallel_size
    if num_layers % stages:
        raise InputError(
            f"--pipeline-model-parallel-size: {stages} stages do not divide --num-layers {num_layers}; choose "
            f"{either(n for n in range(1, num_layers + 1) if num_layers % n == 0)}, or uneven stages by "
            "--decoder-first-pipeline-num-layers, --decoder-last-pipeline-num-layers or "
            "--pipeline-model-parallel-layout auto"
        )
    return [num_layers // stages] * stages


# The number of layers of each chunk of the model, by `ParallelConfig.layer_split`. `megatron.plugins` adds to them.
LAYER_SPLITS: dict[str, Callable[[ParallelConfig, int], list[int]]] = {"even": even_split}


def split_layers(config: ParallelConfig, num_layers: int) -> list[list[Chunk]]:
    """Split the layers into the chunks of each stage. Chunk c of stage p is that of `part_of`.

    Raises:
        InputError: the layers do not divide as the flags say.
    """
    stages, sizes = config.pipeline_model_parallel_size, LAYER_SPLITS[config.layer_split](config, num_layers)
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    parts = [
        Chunk(range(end - size, end), i == 0, i == len(sizes) - 1, config.v_shaped)
        for i, (size, end) in enumerate(zip(sizes, ends, strict=True))
    ]
    return [
        [parts[part_of(stage, c, stages, config.v_shaped)] for c in range(len(sizes) // stages)]
        for stage in range(stages)
    ]
