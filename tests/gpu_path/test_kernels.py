"""Kernels and bytes of a layer on a GPU against golden numbers and closed forms.

`PYTHONPATH=.:tests python tests/gpu_path/golden.py` writes the golden numbers again.
"""

from __future__ import annotations

import json

import pytest
import torch
from gpu_path.golden import (
    FILE,
    SHAPES,
    TORCH,
    compiled,
    config_of,
    hand_count,
    kernels,
    measure,
    measure_compiled,
    operations,
    other_bytes,
)
from gpu_path.layer_trace import Operation, trace

from megatron.arguments import parse_run_config
from megatron.model.mlp import MLP
from megatron.model.transformer import SelfAttention
from megatron.pretrain_gpt import DEFAULTS, GPT

# One activation [s, b, h] of the residual stream in bf16.
ACTIVATION = 1024 * 8 * 1024 * 2
COPIES = {"_to_copy", "clone", "contiguous", "copy_"}
SMALL = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 1023 --train-iters 1 --lr 1e-4 --bf16 --num-layers 1
    --hidden-size 128 --num-attention-heads 2 --seq-length 256 --micro-batch-size 2 --global-batch-size 2
"""
# By default those that cover the most operations.
EACH_SHAPE = pytest.mark.parametrize(
    "shape", [pytest.param(s, marks=() if s in ("GPT-2", "Llama") else pytest.mark.slow) for s in SHAPES]
)


def small(more: str = "") -> list[Operation]:
    """Operations of a small model's step."""
    return trace(parse_run_config(f"{SMALL} {more}".split(), description="", defaults=DEFAULTS), GPT)


def copies(operations: list[Operation]) -> list[str]:
    """Copies and casts as large as an activation of the small model."""
    return [o.name for o in operations if o.name in COPIES and o.bytes >= 2 * 2 * 256 * 2 * 128]


def fp32_logits(operations: list[Operation], vocabulary: int) -> list[Operation]:
    """Operations that write fp32 numbers for each token and id of the vocabulary."""
    return [
        operation
        for operation in operations
        for shape, dtype in operation.outputs
        if dtype == torch.float32 and len(shape) > 1 and shape[-1] == vocabulary
    ]


def golden_numbers() -> dict:
    """The golden numbers. Skips the test if they are those of another version of torch."""
    golden = json.loads(FILE.read_text(encoding="utf-8"))
    if golden["torch"] != TORCH:
        pytest.skip(f"golden numbers are those of torch {golden['torch']}, and this is {TORCH}")
    return golden


@EACH_SHAPE
def test_golden_numbers(shape: str) -> None:
    assert measure(shape) == golden_numbers()["shapes"][shape]


@pytest.mark.parametrize(
    "shape", [pytest.param(s, marks=() if s == "GPT-2" else pytest.mark.slow) for s in SHAPES]
)
def test_golden_numbers_of_compiled_layers(shape: str) -> None:
    golden = golden_numbers()["compiled layers"][shape]
    assert measure_compiled(shape) == golden
    layer = compiled(shape).operations
    for direction, count in (("forward", 4), ("backward", 8)):
        assert sum(o.kind == "matmul" and o.direction == direction for o in layer) == count
    # Less would be an error of the count, or of the hand's.
    assert 1 <= other_bytes(layer) / hand_count(config_of(shape, 1)) < 1.5


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_fp8_casts_are_fused(recipe: str) -> None:
    """All products of a compiled layer are scaled ones, with operands of a byte. A cast that is not fused reads its
    operand twice and writes bytes: 5 bytes for each element of the operands of three products."""
    pytest.importorskip("torchao", reason="needs pip install torchao")
    plain, fp8 = (
        compiled("GPT-2", flags).operations for flags in ("", f"--fp8-format hybrid --fp8-recipe {recipe}")
    )
    for direction, count in (("forward", 4), ("backward", 8)):
        names = [o.name for o in fp8 if o.kind == "matmul" and o.direction == direction]
        assert names == ["_scaled_mm"] * count
    tokens, h = 8 * 1024, 1024
    operands = 2 * (12 * h * h + (7 + 9) * tokens * h)
    casts = other_bytes(fp8) - other_bytes(plain)
    assert operands < casts < 4 * operands
    products = [sum(o.bytes for o in found if o.kind == "matmul") for found in (plain, fp8)]
    assert products[1] < 0.7 * products[0]


def test_bytes_of_a_layer_in_closed_form() -> None:
    """Forward of GPT-2: two norms, two residuals and GELU read and write 18 activations; two dropouts read and write
    one each, and masks of half an activation."""
    layer, _ = operations("GPT-2")
    found = sum(o.bytes for o in layer if o.kind == "other" and o.direction == "forward")
    assert kernels(layer, "forward") == 7
    assert found == pytest.approx((18 + 2 * 2.5) * ACTIVATION, rel=1e-3)  # and the weights of the norms


def test_products_of_a_layer() -> None:
    """Four linear layers: a product each forward, and two each backward."""
    layer, _ = operations("GPT-2")
    for direction, count in (("forward", 4), ("backward", 8)):
        assert sum(o.kind == "matmul" and o.direction == direction for o in layer) == count


@EACH_SHAPE
def test_the_loss_writes_no_fp32_logits(shape: str) -> None:
    _, rest = operations(shape)
    assert fp32_logits(rest, 50304) == []


def test_a_layer_copies_and_casts_nothing() -> None:
    layer, _ = operations("GPT-2")
    assert [o for o in layer if o.name in COPIES] == []


def test_copies_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = copies(small())
    assert fp32_logits(small(), 1024) == []
    forward = MLP.forward
    monkeypatch.setattr(MLP, "forward", lambda self, x, *_: forward(self, x.float().bfloat16()))
    assert len(copies(small())) == len(sound) + 4  # each way, forward and backward
    monkeypatch.setattr(MLP, "forward", forward)
    split = SelfAttention.split_heads
    monkeypatch.setattr(
        SelfAttention, "split_heads", lambda self, qkv: tuple(x.contiguous() for x in split(self, qkv))
    )
    assert len(copies(small())) > len(sound)


def test_fp32_logits_are_found() -> None:
    assert fp32_logits(small("--no-torch-compile"), 1024) != []
