"""Divisions of the layers among pipeline stages, against Megatron-LM's rules."""

from __future__ import annotations

import itertools
import random

import pytest

import megatron.plugins  # noqa: F401 (registers the divisions)
from megatron.parallel.config import ParallelConfig
from megatron.parallel.stages import split_layers

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
