"""Embedding lookup."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.parallel.parameters import main_grad


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape, ctx.dtype, ctx.main_grad = weight.shape, weight.dtype, main_grad(weight)
        return F.embedding(index, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        (index,) = ctx.saved_tensors
        if ctx.main_grad is not None:
            add_rows(ctx.main_grad, index, grad)
            return None, None
        total = torch.zeros(ctx.shape, dtype=torch.float32, device=grad.device)
        add_rows(total, index, grad)
        return total.to(ctx.dtype), None


def add_rows(total: Tensor, index: Tensor, rows: Tensor) -> None:
    """total[index] += rows, in the same order each time: total [n, h] in fp32, index [...] and rows [..., h]."""
    index, rows = index.flatten(), rows.flatten(0, -2).float()
    if total.is_cuda:  # where index_add_ is atomic, and index_put_ sorts
        total.index_put_((index,), rows, accumulate=True)
    else:
        total.index_add_(0, index, rows)


def embedding(index: Tensor, weight: Tensor) -> Tensor:
    """weight[index]: index [...] and weight [rows, h] to [..., h].

    The gradient is summed in fp32, into `main_grad` where the weight has one. Torch sums it in the dtype of the weight,
    and a bf16 sum of a frequent row stops growing after a few hundred terms.
    """
    return _Embedding.apply(weight, index)
