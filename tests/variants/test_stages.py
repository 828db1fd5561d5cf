"""Divisions of the layers among pipeline stages, against Megatron-LM's rules."""

from __future__ import annotations

import itertools
import random

import pytest

from megatron.arguments import parse_run_config
from megatron.errors import InputError
from megatron.parallel.config import ParallelConfig
from megatron.parallel.schedules import part_of
from megatron.parallel.stages import split_layers
from megatron.plugins import prepared
from megatron.pretrain_gpt import GPT
from megatron.variants.auto_stages import balanced_sizes

# The example of Megatron-LM's parser, and its parts there.
NVIDIA = ("Ettt|(tt|)*29,m|L", ["Ettt", *["tt"] * 29, "m", "L"])


def layers(stages: int, num_layers: int, **flags: object) -> list[list[list[int]]]:
    config = ParallelConfig(pipeline_model_parallel_size=stages, **flags)
    return [[list(chunk.layers) for chunk in stage] for stage in split_layers(config, num_layers)]


def parts(text: str, stages: int = 2) -> list[str]:
    return ParallelConfig(
        pipeline_model_parallel_size=stages, pipeline_model_parallel_layout=text
    ).layout_parts


def test_the_layout_of_nvidias_example() -> None:
    assert parts(NVIDIA[0], 4) == NVIDIA[1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Ett|ttL", ["Ett", "ttL"]),
        ("Et*3|(tt)*2,L", ["Ettt", "ttttL"]),
        ("E|(t|)*2L", ["E", "t", "t", "L"]),
        ("E(|t)*2,t|L", ["E", "t", "tt", "L"]),
        ("E(t*2|t|)*1m*2,L|", ["Ett", "t", "mmL", ""]),
    ],
)
def test_shorthands_of_a_layout(text: str, expected: list[str]) -> None:
    assert parts(text) == expected


def test_random_layouts_hold_every_layer_once_in_order() -> None:
    rng = random.Random(0)
    for _ in range(200):
        stages, chunks = rng.randint(2, 5), rng.randint(1, 3)
        sizes = [rng.randint(1, 4) for _ in range(stages * chunks)]
        text = "|".join(rng.choice((f"t*{n}", "t" * n)) for n in sizes)
        found = layers(stages, sum(sizes), pipeline_model_parallel_layout=f"E{text}L")
        in_order = [found[stage][chunk] for chunk in range(chunks) for stage in range(stages)]
        assert [len(part) for part in in_order] == sizes
        assert list(itertools.chain(*in_order)) == list(range(sum(sizes)))


def test_ends_that_count_as_layers() -> None:
    """As in Megatron-LM: the first and the last chunk have one layer less."""
    both = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
    assert layers(4, 6, **both) == [[[0]], [[1, 2]], [[3, 4]], [[5]]]
    assert layers(2, 3, account_for_loss_in_pipeline_split=True) == [[[0, 1]], [[2]]]
    assert layers(2, 3, account_for_embedding_in_pipeline_split=True) == [[[0]], [[1, 2]]]
    chunked = layers(2, 6, num_layers_per_virtual_pipeline_stage=2, **both)
    assert chunked == [[[0], [3, 4]], [[1, 2], [5]]]
    assert layers(2, 2, **both, num_layers_per_virtual_pipeline_stage=1) == [[[], [1]], [[0], []]]


def most_work(sizes: list[int], layers: list[float], head: float, stages: int, *, v_shaped: bool) -> float:
    """Work of the rank that has the most."""
    work, begin = [0.0] * stages, 0
    for part, size in enumerate(sizes):
        rank = part_of(part % stages, part // stages, stages, v_shaped) % stages
        work[rank] += sum(layers[begin : begin + size]) + (head if part == len(sizes) - 1 else 0)
        begin += size
    return max(work)


@pytest.mark.parametrize(
    ("stages", "chunks", "v_shaped"), [(2, 1, False), (3, 1, False), (2, 2, True), (2, 2, False)]
)
def test_balanced_sizes_are_the_best_of_all(stages: int, chunks: int, v_shaped: bool) -> None:
    rng, parts = random.Random(0), stages * chunks
    for _ in range(40):
        layers, head = [1.0] * rng.randint(parts, 9), rng.uniform(0, 5)
        sizes = balanced_sizes(layers, head, stages, chunks, v_shaped=v_shaped)
        assert sum(sizes) == len(layers) and all(sizes[1:-1])
        best = min(
            most_work(list(other), layers, head, stages, v_shaped=v_shaped)
            for other in itertools.product(range(len(layers) + 1), repeat=parts)
            if sum(other) == len(layers) and all(other[1:-1])
        )
        assert most_work(sizes, layers, head, stages, v_shaped=v_shaped) == pytest.approx(best)


def test_sizes_of_layers_of_different_work() -> None:
    """Dense layers, then layers with experts of twice their work."""
    assert balanced_sizes([1.0] * 4 + [2.0] * 4, 4.0, 2, 1, v_shaped=False) == [6, 2]


RUN = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1 --train-samples 8 "
    "--global-batch-size 8 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 2048"
)
AUTO = "--pipeline-model-parallel-layout auto"


def resolved(flags: str) -> str | None:
    config = parse_run_config(f"{RUN} {flags}".split(), description="", defaults={})
    return prepared(config, GPT)[0].parallel.pipeline_model_parallel_layout


def test_the_automatic_layout_of_a_run() -> None:
    """An output layer for 2048 tokens has the work of two to three layers, one for 128,000 of a hundred."""
    pipeline = f"--pipeline-model-parallel-size 2 {AUTO}"
    assert resolved(pipeline) == "Et*5|t*3,L"
    assert resolved(f"{pipeline} --vocab-size 128000") == "Et*8|L"
    assert resolved(f"{pipeline} --mtp-num-layers 1 --position-embedding-type rope") == "Et*7|t,m,L"
    assert resolved(f"{pipeline} --pipeline-schedule zb-v") == "Et*3|t*3|t*2|L"
    for flags, message in {
        AUTO: r"^--pipeline-model-parallel-layout needs --pipeline-model-parallel-size above 1$",
        f"{pipeline} --decoder-last-pipeline-num-layers 1": "does not go with",
        f"--pipeline-model-parallel-size 8 {AUTO} --pipeline-schedule interleaved": (
            r"^--pipeline-model-parallel-layout auto: 8 layers \(--num-layers\) are too few for 16 parts of the model; "
            "choose at least 14, or fewer stages$"
        ),
    }.items():
        with pytest.raises(InputError, match=message):
            resolved(flags)
