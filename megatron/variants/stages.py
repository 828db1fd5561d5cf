"""Divisions of the layers among pipeline stages other than the even one.

A first or last stage with another number of layers (--decoder-first-pipeline-num-layers, ...-last-...), and several
chunks on each rank for the interleaved schedule (--num-layers-per-virtual-pipeline-stage).
"""

from __future__ import annotations

from megatron.errors import InputError
from megatron.flags import either
from megatron.parallel.config import ParallelConfig


def virtual_split(config: ParallelConfig, num_layers: int) -> list[int]:
    """Layers of each chunk: as many as --num-layers-per-virtual-pipeline-stage says.

    Raises:
        InputError: the layers do not divide as the flags say.
    """
    stages, each = config.pipeline_model_parallel_size, config.num_layers_per_virtual_pipeline_stage
    assert each is not None
    if num_layers % (stages * each):
        fitting = [n for n in range(1, num_layers // stages + 1) if num_layers % (stages * n) == 0]
        raise InputError(
            f"--num-layers-per-virtual-pipeline-stage {each}: chunks of {_layers(each)} on {stages} stages "
            f"(--pipeline-model-parallel-size) do not make up --num-layers {num_layers}; choose "
            + (f"chunks of {either(fitting)}" if fitting else f"--num-layers a multiple of {stages}")
        )
    return [each] * (num_layers // each)


def uneven_split(config: ParallelConfig, num_layers: int) -> list[int]:
    """Layers of each stage.

    Raises:
        InputError: the layers do not divide as the flags say.
    """
    stages = config.pipeline_model_parallel_size
    uneven = {
        0: config.decoder_first_pipeline_num_layers,
        stages - 1: config.decoder_last_pipeline_num_layers,
    }
    given = {stage: layers for stage, layers in uneven.items() if layers is not None}
    _check_uneven(given, stages, num_layers)
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
                f"{said}: the two stages hold {_layers(sum_)} of --num-layers {num_layers}; leave one of the two "
                "out"
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
