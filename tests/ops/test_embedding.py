"""Embedding lookup and the accumulation of its gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron.ops.embedding import embedding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_torch(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(10, 4, generator=generator).to(dtype)
    index = torch.randint(10, (3, 2), generator=generator)
    grads = []
    for lookup in (embedding, lambda i, w: F.embedding(i, w)):
        parameter = weight.clone().requires_grad_()
        rows = lookup(index, parameter)
        assert torch.equal(rows, weight[index])
        (rows.float() ** 2).sum().backward()
        grads.append(parameter.grad)
    torch.testing.assert_close(grads[0], grads[1])


def test_gradients_are_added_to_the_sum_over_microbatches() -> None:
    weight = torch.zeros(5, 2, dtype=torch.bfloat16, requires_grad=True)
    weight.main_grad = torch.ones(5, 2)
    index = torch.tensor([[3, 1], [3, 0]])
    embedding(index, weight).backward(torch.tensor([[[1, 2], [3, 4]], [[5, 6], [7, 8]]]).bfloat16())
    assert weight.grad is None
    assert torch.equal(weight.main_grad, torch.tensor([[8, 9], [4, 5], [1, 1], [7, 9], [1, 1]]).float())


def test_many_gradients_of_one_row_accumulate_in_bf16() -> None:
    weight = torch.zeros(3, 2, dtype=torch.bfloat16, requires_grad=True)
    rows = embedding(torch.ones(4096, dtype=torch.long), weight)
    rows.backward(torch.full_like(rows, 1e-3))
    assert weight.grad[1, 0].item() == pytest.approx(4.096, rel=0.01)
