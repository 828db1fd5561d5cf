"""Layouts given as letters and sizes."""

from __future__ import annotations

import re

import pytest

from megatron.commands import plan
from megatron.errors import InputError
from megatron.planner.layout import Layout
from megatron.planner.shape import given_devices, parse_sizes

LLAMA = ["--model", "llama3-70b", "--gpu", "h100"]


def test_sizes_of_a_layout() -> None:
    sizes = parse_sizes("T8P8D4V12b1")
    assert Layout(**sizes) == Layout(tensor=8, pipeline=8, data=4, chunks=12)
    assert given_devices("T8P8D4V12b1") == 256 and given_devices("T8 P8") is None
    assert parse_sizes("t8p8d4v12B1") == sizes
    assert parse_sizes("T2 C4 E8 b2") == {"tensor": 2, "context": 4, "expert": 8, "micro_batch_size": 2}


@pytest.mark.parametrize("text", ["", "8", "T", "T8T4", "T8x2", "x8", "T0", "T8-P8"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"is not a layout such as T8P8D4V12b1"):
        parse_sizes(text)


def test_a_given_layout_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    """With the schedule, sharding and recomputation that are fastest; the GPUs follow from the sizes."""
    plan.main([*LLAMA, "--layout", "T8P4D8V5b1"])
    out = capsys.readouterr().out
    assert "The best: T8 P4 D8, V5, microbatch 1, sequence parallel" in out and "256 " in out
    assert "--num-layers-per-virtual-pipeline-stage 4" in out


def test_a_given_layout_may_have_stages_of_equal_work(capsys: pytest.CaptureFixture[str]) -> None:
    """36 layers on 16 stages, which no equal numbers of layers fill."""
    plan.main(["--model", "gpt-oss-120b", "--gpu", "h100", "--layout", "P16D4"])
    out = capsys.readouterr().out
    assert re.search(r"The best: T1 P16 D4,.* stages of equal work", out)
    assert "--pipeline-model-parallel-layout auto" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("T8P4D8 --gpus 512", "takes 256 GPUs, and the cluster has 512"),
        ("T7 --gpus 7", "T7 does not divide the heads"),
        ("T8P64V3D1", "80 layers in 512 microbatches do not divide into P64 x V3"),
        ("T8P4D8b5", "D8 x b5 does not divide --global-batch-size"),
        ("T8C3D1", "--seq-length 8192 is not a multiple of 2 x 3"),
        ("T8E2D1", "E2 does not divide the experts"),
        ("D8V4", "V4 needs P above 1"),
        ("T4D1", "does not fit: it needs [0-9.]+ GB of the [0-9.]+ that are usable"),
        ("T8D1 --days 3 --tokens 1e9", "leave out --layout, or --days"),
    ],
)
def test_what_cannot_be_is_one_line(words: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        plan.main([*LLAMA, "--layout", *words.split()])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("T4D4 --seq-length 4098", "--seq-length 4098 is not a multiple of T4, whose ranks route"),
        ("T8C2D1 --seq-length 8200", "--seq-length 8200 over C2 is not a multiple of T8, whose ranks route"),
    ],
)
def test_ranks_that_cannot_route_equal_parts_are_named(words: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        plan.main(["--model", "mixtral-8x7b", "--gpu", "h100", "--layout", *words.split()])
