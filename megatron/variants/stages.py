"""Divisions of the layers among pipeline stages other than the even one.

A first or last stage with another number of layers (--decoder-first-pipeline-num-layers, ...-last-...), several chunks
on each rank (--num-layers-per-virtual-pipeline-stage), the embedding and the loss counted as layers
(--account-for-embedding-in-pipeline-split, ...-loss-...), and any division (--pipeline-model-parallel-layout).
"""

from __future__ import annotations

import re

from megatron.errors import InputError
from megatron.flags import either
from megatron.parallel.config import ParallelConfig
from megatron.training.batch_size import BatchSchedule
from megatron.training.config import RunConfig

# Flags that divide the layers: those of one group go together.
DIVISIONS = (
    (
        "num_layers_per_virtual_pipeline_stage",
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
    ),
    ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
    ("pipeline_model_parallel_layout",),
)


def check_division(config: ParallelConfig) -> None:
    """Check that the flags that divide the layers among stages go together.

    Raises:
        InputError: names two of them, or one that needs a pipeline.
    """
    given = [
        (group, f"--{name.replace('_', '-')}")
        for group in DIVISIONS
        for name in group
        if getattr(config, name) not in (None, False)
    ]
    for group, name in given:
        if config.pipeline_model_parallel_size == 1:
            raise InputError(f"{name} needs --pipeline-model-parallel-size above 1")
        if group != given[0][0]:
            raise InputError(f"{name} does not go with {given[0][1]}; leave one out")


def virtual_split(config: ParallelConfig, num_layers: int) -> list[int]:
    """Layers of each chunk: as many as --num-layers-per-virtual-pipeline-stage says, less a counted embedding or loss.

    Raises:
        InputError: the layers do not divide as the flags say.
    """
    stages, each = config.pipeline_model_parallel_size, config.num_layers_per_virtual_pipeline_stage
    assert each is not None
    check_division(config)
    embedding, loss = _counted_ends(config)
    total = num_layers + embedding + loss
    if total % (stages * each):
        fitting = [n for n in range(1, total // stages + 1) if total % (stages * n) == 0]
        raise InputError(
            f"--num-layers-per-virtual-pipeline-stage {each}: chunks of {_layers(each)} on {stages} stages "
            f"(--pipeline-model-parallel-size) do not make up {_counted(config, num_layers)}; choose "
            + (f"chunks of {either(fitting)}" if fitting else _nearest(config, num_layers))
        )
    return _less_ends(config, [each] * (total // each))


def counted_split(config: ParallelConfig, num_layers: int) -> list[int]:
    """Layers of each stage, all equal if the embedding, the loss or both count as layers.

    Raises:
        InputError: the layers do not divide among the stages.
    """
    stages = config.pipeline_model_parallel_size
    total = num_layers + sum(_counted_ends(config))
    check_division(config)
    if total % stages:
        raise InputError(
            f"--pipeline-model-parallel-size: {stages} stages do not divide {_counted(config, num_layers)}; choose "
            f"{_nearest(config, num_layers)}"
        )
    return _less_ends(config, [total // stages] * stages)


def _counted_ends(config: ParallelConfig) -> tuple[int, int]:
    """Layers that the embedding and the loss count as."""
    return int(config.account_for_embedding_in_pipeline_split), int(config.account_for_loss_in_pipeline_split)


def _counted(config: ParallelConfig, num_layers: int) -> str:
    names = [name for name, on in zip(("embedding", "loss"), _counted_ends(config), strict=True) if on]
    added = f" with the {' and the '.join(names)}, {num_layers + len(names)} in all" if names else ""
    return f"--num-layers {num_layers}{added}"


def _nearest(config: ParallelConfig, num_layers: int) -> str:
    """Advice on numbers of layers that divide."""
    ends, stages = sum(_counted_ends(config)), config.pipeline_model_parallel_size
    if not ends:
        return f"--num-layers a multiple of {stages}"
    below = (num_layers + ends) // stages * stages - ends
    nearest = either(n for n in (below, below + stages) if n > 0)
    return f"--num-layers {nearest}, or use --pipeline-model-parallel-layout auto instead"


def _less_ends(config: ParallelConfig, sizes: list[int]) -> list[int]:
    embedding, loss = _counted_ends(config)
    return [sizes[0] - embedding, *sizes[1:-1], sizes[-1] - loss]


def layout_split(config: ParallelConfig, num_layers: int) -> list[int]:
    """Layers of each part of --pipeline-model-parallel-layout.

    Raises:
        InputError: the parts are not those of a model of `num_layers`.
    """
    name, parts = (
        f"--pipeline-model-parallel-layout {config.pipeline_model_parallel_layout}",
        config.layout_parts,
    )
    check_division(config)
    if len(parts) % config.pipeline_model_parallel_size:
        raise InputError(
            f"{name}: its number of parts, {len(parts)}, is not a multiple of --pipeline-model-parallel-size "
            f"{config.pipeline_model_parallel_size}; separate parts by |"
        )
    strange = sorted(set("".join(parts)) - set("EtmL"))
    if strange:
        raise InputError(
            f"{name}: {strange[0]!r} is none of E (embedding), t (layer), m (multi-token prediction), L (loss), | and "
            "repetitions such as t*3 and (tt|)*3"
        )
    if "" in parts:
        raise InputError(f"{name}: part {parts.index('') + 1} of {len(parts)} is empty; give it a t")
    if not re.fullmatch(r"E[t|]*m*L", "|".join(parts)):
        raise InputError(
            f"{name}: the model begins with one E and ends with one L, in that part after all m; between them are "
            "t and |"
        )
    count = sum(part.count("t") for part in parts)
    if count != num_layers:
        raise InputError(
            f"{name}: it has {_layers(count)} (t), and --num-layers is {num_layers}; make them equal"
        )
    return [part.count("t") for part in parts]


def check_depths(config: RunConfig, batches: BatchSchedule) -> None:
    """Check that --pipeline-model-parallel-layout has the depths of multi-token prediction.

    Raises:
        InputError: it has another number.
    """
    parallel, depths = config.parallel, config.model.mtp_num_layers
    if parallel.pipeline_model_parallel_layout is not None:
        count = "".join(parallel.layout_parts).count("m")
        if count != depths:
            raise InputError(
                f"--pipeline-model-parallel-layout {parallel.pipeline_model_parallel_layout}: it has {count} depths of "
                f"multi-token prediction (m), and --mtp-num-layers is {depths}; make them equal"
            )


def uneven_split(config: ParallelConfig, num_layers: int) -> list[int]:
    """Layers of each stage.

    Raises:
        InputError: the layers do not divide as the flags say.
    """
    stages = config.pipeline_model_parallel_size
    check_division(config)
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
