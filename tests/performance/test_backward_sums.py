"""Passes over the backward graph of compiled layers against sums in fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from megatron.performance.backward_sums import BackwardSums

aten = torch.ops.aten
BLOCKS = 8


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def passed(function: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    """The graph of a function after the passes."""
    module = make_fx(function)(*inputs)
    BackwardSums(BLOCKS)(module.graph)
    module.graph.lint()
    module.recompile()
    return module


def calls(module: fx.GraphModule, target: Callable[..., Any]) -> int:
    return len(module.graph.find_nodes(op="call_function", target=target))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [4 * BLOCKS, 4 * BLOCKS + 1])
def test_sums_by_blocks(rows: int, dtype: torch.dtype) -> None:
    """A bias's gradient added to `main_grad`; rows that the blocks do not divide are summed as before."""
    grad, main_grad = random(rows, 48, dtype=dtype), random(48)
    module = passed(lambda main_grad, grad: main_grad + grad.sum(0), main_grad, grad)
    assert calls(module, aten.sum.dim_IntList) == (2 if rows % BLOCKS == 0 else 1)
    exact = main_grad.double() + grad.double().sum(0)
    error = (module(main_grad, grad).double() - exact).norm() / exact.norm()
    assert error < (1e-6 if dtype == torch.float32 else 4e-3)
    assert passed(lambda x: x.sum(0), grad)(grad).dtype == dtype


def test_other_sums_stay() -> None:
    x, matrix = random(2, BLOCKS, 8), random(BLOCKS, 8)
    for function, input in (
        (lambda x: x.sum((0, 1)), x),
        (lambda x: x.sum(1), matrix),
        (lambda x: x.sum(0, keepdim=True), matrix),
    ):
        module = passed(function, input)
        assert calls(module, aten.sum.dim_IntList) == 1
        assert torch.equal(module(input), function(input))


def test_additions_are_merged() -> None:
    totals, grads = [random(n) for n in (3, 4, 5, 6)], [random(n) + 1 for n in (3, 4, 5, 6)]

    def add(*tensors: Tensor) -> list[Tensor]:
        a, b = tensors[:4], tensors[4:]
        first = torch._foreach_add(a[:2], b[:2])
        return [*first, *torch._foreach_add(a[2:], b[2:])]

    module = passed(add, *totals, *grads)
    assert calls(module, aten._foreach_add.List) == 1
    for found, total, grad in zip(module(*totals, *grads), totals, grads, strict=True):
        assert torch.equal(found, total + grad)


def test_an_addition_to_a_sum_is_not_merged() -> None:
    """As of a norm that a layer calls twice."""
    total, grad = random(3), random(3) + 1

    def add(total: Tensor, grad: Tensor) -> Tensor:
        (once,) = torch._foreach_add([total], [grad])
        return torch._foreach_add([once], [grad])[0]

    module = passed(add, total, grad)
    assert calls(module, aten._foreach_add.List) == 2
    assert torch.equal(module(total, grad), total + grad + grad)
