"""--pipeline-model-parallel-layout auto: stages of equal work, counted in floating-point operations."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from megatron.errors import InputError
from megatron.model.config import ModelConfig
from megatron.parallel.schedules import CHUNKED, V_SHAPED, part_of
from megatron.tokenizer import build_tokenizer, padded_vocab_size
from megatron.training.config import RunConfig
from megatron.variants.auto_schedule import part_flops
from megatron.variants.stages import check_division

AUTO = "auto"


def with_auto_layout(config: RunConfig) -> RunConfig:
    """Replace --pipeline-model-parallel-layout auto by the division of the layers that it stands for.

    Raises:
        InputError: another flag divides the layers, there are too few of them, or the vocabulary's size is unknown.
    """
    parallel = config.parallel
    if parallel.pipeline_model_parallel_layout != AUTO:
        return config
    check_division(parallel)
    vocab_size = config.tokenizer.vocab_size or build_tokenizer(config.tokenizer).vocab_size
    padded = padded_vocab_size(
        vocab_size, config.tokenizer.make_vocab_size_divisible_by, parallel.tensor_model_parallel_size
    )
    layout = balanced_layout(config, padded)
    return dataclasses.replace(
        config, parallel=dataclasses.replace(parallel, pipeline_model_parallel_layout=layout)
    )


def balanced_layout(config: RunConfig, padded_vocab_size: int) -> str:
    """The division by `stage_sizes`, as a value of --pipeline-model-parallel-layout."""
    parallel, model, length = config.parallel, config.model, config.data.seq_length
    assert length is not None
    stages, schedule = parallel.pipeline_model_parallel_size, parallel.pipeline_schedule
    parts = stages * (2 if schedule in CHUNKED else 1)
    if model.num_layers < parts - 2:
        raise InputError(
            f"--pipeline-model-parallel-layout auto: {model.num_layers} layers (--num-layers) are too few for {parts} "
            f"parts of the model; choose at least {parts - 2}, or fewer stages"
        )
    sizes = stage_sizes(
        model,
        length,
        padded_vocab_size,
        stages,
        parts // stages,
        v_shaped=schedule in V_SHAPED,
        recompute=parallel.recompute_granularity == "full",
    )
    return layout_text(sizes, model.mtp_num_layers)


def layout_text(sizes: Sequence[int], depths: int) -> str:
    """The value of --pipeline-model-parallel-layout for layers of each part and depths of multi-token prediction."""
    names = [f"t*{size}" if size > 1 else "t" * size for size in sizes]
    names[0] = f"E{names[0]}"
    names[-1] = ",".join(name for name in (names[-1], "m" * depths, "L") if name)
    runs = [(name, len(list(same))) for name, same in itertools.groupby(names)]
    return "".join(f"({name}|)*{times}" if times > 1 else f"{name}|" for name, times in runs)[:-1]


def stage_sizes(
    model: ModelConfig,
    length: int,
    padded_vocab_size: int,
    stages: int,
    chunks: int,
    *,
    v_shaped: bool = False,
    recompute: bool = False,
) -> list[int]:
    """Layers of each part of a model, by `balanced_sizes` for its counted operations. The embedding has none.

    Args:
        length: of a sample.
        recompute: backward runs the forward pass of layers again.
    """
    layers = [
        sum(part_flops(model, range(i, i + 1), length, None, recompute=recompute))
        for i in range(model.num_layers)
    ]
    head = sum(part_flops(model, range(0), length, padded_vocab_size, recompute=recompute))
    return balanced_sizes(layers, head, stages, chunks, v_shaped=v_shaped)


def balanced_sizes(
    layers: Sequence[float], head: float, stages: int, chunks: int, *, v_shaped: bool
) -> list[int]:
    """Number of layers of each part of the model, so that the rank with the most work has as little as possible.

    Starts from equal numbers and moves one layer at a time from a part to another as long as that helps. Of divisions
    with the same most work it prefers those whose ranks, and then parts, are more alike.

    Args:
        layers: work of each layer.
        head: work of the output layer and loss, which belong to the last part.
    """
    parts = stages * chunks
    ends = list(itertools.accumulate(layers, initial=0.0))
    ranks = [part_of(part % stages, part // stages, stages, v_shaped) % stages for part in range(parts)]

    def work(sizes: list[int]) -> tuple[float, float, float]:
        bounds = list(itertools.accumulate(sizes, initial=0))
        of_parts = [ends[end] - ends[begin] for begin, end in itertools.pairwise(bounds)]
        of_parts[-1] += head
        of_ranks = [0.0] * stages
        for rank, cost in zip(ranks, of_parts, strict=True):
            of_ranks[rank] += cost
        return max(of_ranks), sum(cost**2 for cost in of_ranks), sum(cost**2 for cost in of_parts)

    def moves(sizes: list[int]) -> Iterator[list[int]]:
        for source, target in itertools.permutations(range(parts), 2):
            # First and last part may have no layer: they have the embedding and the output layer.
            if sizes[source] > (0 if source in (0, parts - 1) else 1):
                moved = list(sizes)
                moved[source] -= 1
                moved[target] += 1
                yield moved

    sizes = _even(len(layers), parts)
    while True:
        best = min(moves(sizes), key=work, default=sizes)
        if work(best) >= work(sizes):
            return sizes
        sizes = best


def _even(layers: int, parts: int) -> list[int]:
    """Numbers of layers that differ by one at most, with fewer at the ends of the model."""
    sizes = [layers // parts] * parts
    middle = sorted(range(parts), key=lambda part: (part in (0, parts - 1), part))
    for part in middle[: layers % parts]:
        sizes[part] += 1
    return sizes
