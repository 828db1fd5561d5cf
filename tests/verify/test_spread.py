"""Runs that measure rounding divide sums over rows as ranks do."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.verify.spread import SumMode

ROWS, WIDTH = 64, 16


def mode(parts: int) -> SumMode:
    return SumMode(torch.Generator().manual_seed(0), parts)


def rounded_sum(x_rh: Tensor, parts: int) -> Tensor:
    """The sum of the sums of ranks that hold these rows, each rounded to bf16."""
    order = torch.randperm(len(x_rh), generator=torch.Generator().manual_seed(0))
    first, *others = (x_rh[rows].double().sum(0).bfloat16() for rows in order.chunk(parts))
    for part in others:
        first = first + part
    return first


@pytest.mark.parametrize("parts", [2, 4])
def test_parts_of_a_sum_are_rounded_before_they_are_added(parts: int) -> None:
    x_rh = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    with mode(parts):
        total = x_rh.sum(0)
    torch.testing.assert_close(total, x_rh.sum(0))  # in fp32 only the order differs
    with mode(parts):
        copy = x_rh.sum(0).to(torch.bfloat16)
    assert torch.equal(copy, rounded_sum(x_rh, parts))
    assert not torch.equal(copy, x_rh.sum(0).bfloat16())


def test_the_gradient_of_a_norm_is_that_of_two_ranks() -> None:
    generator = torch.Generator().manual_seed(2)
    x, grad = (torch.randn(ROWS // 2, 2, WIDTH, generator=generator).bfloat16() for _ in "xg")
    weight, bias = (torch.ones(WIDTH, dtype=torch.bfloat16, requires_grad=True) for _ in "wb")

    def gradients(x: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        inputs = x.clone().requires_grad_()
        return torch.autograd.grad(F.layer_norm(inputs, (WIDTH,), weight, bias), (inputs, weight, bias), grad)

    with mode(2):
        of_x, *sums = gradients(x, grad)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))
    ranks = [gradients(*(t.flatten(0, 1)[rows] for t in (x, grad))) for rows in order.chunk(2)]
    assert torch.equal(of_x, gradients(x, grad)[0])
    for total, one, other in zip(sums, ranks[0][1:], ranks[1][1:], strict=True):
        assert torch.equal(total, one + other)
