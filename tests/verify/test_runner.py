"""Layouts, resumes and certificates of a verification, without processes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megatron.commands.verify import VerifyConfig, other_layouts, parse
from megatron.data.zigzag import Zigzag
from megatron.parallel.parameters import parameter, zeros
from megatron.parallel.slices import GlobalSlice
from megatron.verify.certificate import certificate
from megatron.verify.layouts import Layout
from megatron.verify.passes import PassCapture
from megatron.verify.runner import STEPS, Check, Runs, Verification
from megatron.verify.shrink import shrink

FLAGS = """
    --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 --global-batch-size 4
    --train-iters 3 --lr 2e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 250
"""


def prepared(flags: str, processes: int, others: tuple[Layout, ...], folder: Path) -> Verification:
    small = shrink(parse("pretrain_gpt", f"{FLAGS} {flags}".split()), processes, 8, STEPS)
    layouts = [small.layout, *others]
    return Verification(Runs(small, layouts, folder, lambda *_: None), layouts, lambda check: None)


def test_a_run_of_one_process_keeps_its_flags(tmp_path: Path) -> None:
    """It is not the reference, which stores all activations."""
    alone = prepared("--recompute-activations", 1, (), tmp_path).runs
    assert alone.configured(Layout(), False).parallel.recompute_granularity == "selective"
    several = prepared("--recompute-activations", 2, (), tmp_path).runs
    assert several.configured(Layout(dp=2), False).parallel.recompute_granularity == "selective"
    assert several.configured(Layout(), False).parallel.recompute_granularity is None


def test_each_layout_is_resumed_in_once(tmp_path: Path) -> None:
    t2, d2 = Layout(2), Layout(dp=2)
    for processes, own, others, expected in (
        (1, Layout(), (t2, d2), [Layout(), d2]),
        (2, d2, (Layout(), t2), [d2, Layout()]),
        (2, d2, (t2, Layout(1, 2)), [d2, Layout(), Layout(1, 2)]),
    ):
        found = prepared("", processes, others, tmp_path)
        assert found._resumes(own, others) == expected


def test_default_layouts_fit_the_processes() -> None:
    assert other_layouts(VerifyConfig(max_processes=2), Layout(2)) == [Layout(1, 2), Layout(dp=2)]
    assert other_layouts(VerifyConfig(max_processes=1), Layout()) == []
    given = VerifyConfig(layouts=("d2e2", "t2d2e4et1", "t2et2"))
    assert other_layouts(given, Layout(dp=2)) == [Layout(dp=2, ep=2), Layout(2, 1, 2, 4, 1), Layout(2)]


def test_a_certificate_without_comparisons_of_the_own_layout_fails() -> None:
    compared = {"weight": {"compared": 3, "failed": 0, "largest": 0.0, "at": ""}}
    checks = [Check(name="own", not_covered="it cannot be split"), Check(name="t2", kinds=compared)]
    assert not certificate("", [], checks, [], 0.0)["passed"]
    assert certificate("", [], checks[::-1], [], 0.0)["passed"]


@pytest.mark.parametrize(
    ("inputs", "dim"), [(torch.zeros(4, 2), 2), (torch.zeros(4, 2, dtype=torch.long), None)]
)
def test_rows_of_a_weight_place_the_output_of_a_product_only(inputs: torch.Tensor, dim: int | None) -> None:
    """The width of an embedding may be the number of the weight's local rows."""
    module = nn.Module()
    module.weight = parameter(GlobalSlice((16, 8), 0, ((0, 8),)), zeros)
    capture = PassCapture.__new__(PassCapture)
    capture.mesh, capture.zigzag = SimpleNamespace(tp=SimpleNamespace(size=2)), Zigzag(4, 1)
    place = capture._place(module, (inputs,), torch.zeros(4, 2, 8))
    assert (place and place.dim) == dim
    # The losses of two sequences of eight tokens.
    assert capture._place(module, (torch.zeros(8, 2, 8),), torch.zeros(2, 8)) is None


def test_a_split_vector_does_not_place_an_output() -> None:
    """The scale of a norm over all heads is as long as a head is wide if each rank has one head."""
    module = nn.Module()
    module.weight = parameter(GlobalSlice((16,), 0, ((0, 8),)), zeros)
    capture = PassCapture.__new__(PassCapture)
    capture.mesh, capture.zigzag = SimpleNamespace(tp=SimpleNamespace(size=2)), Zigzag(4, 1)
    assert capture._place(module, (torch.zeros(1, 1, 4, 8),), torch.zeros(1, 1, 4, 8)) is None
