"""Which layers each stage of a pipeline holds (arXiv 2104.04473 section 2.2)."""

from __future__ import annotations

import dataclasses

from megatron.flags import InputError
from megatron.parallel.config import ParallelConfig


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A part of the model that one process holds: layers that follow on each other, and its ends."""

    layers: range
    first: bool = True  # it begins the model: embeddings
    last: bool = True  # it ends the model: final normalisation, output layer, loss


def chunks_per_stage(config: ParallelConfig, num_layers: int) -> int:
    """V, the chunks that each process holds: 1 but for the interleaved schedule.

    Raises:
        InputError: the layers cannot be divided as the flags say.
    """
    stages, each = config.pipeline_model_parallel_size, config.num_layers_per_virtual_pipeline_stage
    if each is None:
        return 1
    if num_layers % (stages * each):
        fitting = [n for n in range(1, num_layers + 1) if num_layers % (stages * n) == 0]
        raise InputError(
            f"--num-layers-per-virtual-pipeline-stage: chunks of {each} layers on "
            f"{stages} stages (--pipeline-model-parallel-size) do not make up --num-layers {num_layers}; "
            + (f"{_any(fitting)} would" if fitting else f"choose --num-layers a multiple of {stages}")
        )
    return num_layers // (stages * each)


def split_layers(config: ParallelConfig, num_layers: int) -> list[list[Chunk]]:
    """The chunks of each stage. Chunk c of stage p is the (c · P + p)-th part of the model.

    Raises:
        InputError: the layers cannot be divided as the flags say.
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
    """Layers of each stage where a stage is one chunk."""
    stages = config.pipeline_model_parallel_size
    given = {
        0: config.decoder_first_pipeline_num_layers,
        stages - 1: config.decoder_last_pipeline_num_layers,
    }
    given = {stage: layers for stage, layers in given.items() if layers is not None}
    rest, others = num_layers - sum(given.values()), stages - len(given)
    if rest < 0 or (others == 0 and rest) or (others and rest % others):
        if given:
            raise InputError(
                f"--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers leave {rest} of "
                f"--num-layers {num_layers} for {others} other stages, which they cannot share equally; "
                "change the two, or --pipeline-model-parallel-size"
            )
        fitting = [n for n in range(1, num_layers + 1) if num_layers % n == 0]
        raise InputError(
            f"--pipeline-model-parallel-size: {stages} stages do not divide --num-layers {num_layers}; choose "
            f"{_any(fitting)}, or --decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers"
        )
    each = rest // others if others else 0
    return [given.get(stage, each) for stage in range(stages)]


def _any(numbers: list[int]) -> str:
    return " or ".join(
        [", ".join(map(str, numbers[:-1])), str(numbers[-1])] if numbers[1:] else map(str, numbers)
    )
