"""Rows of a table."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows, ctx.dtype = weight.shape[0], weight.dtype
        return F.embedding(index, weight)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        summed = torch.ops.aten.embedding_dense_backward(grad.float(), index, ctx.rows, -1, False)
        return summed.to(ctx.dtype), None


def embedding(index: Tensor, weight: Tensor) -> Tensor:
    """weight[index]: index [...] and weight [rows, h] to [..., h].

    The gradients of a row that is looked up many times are summed in fp32: torch's own sum, in the dtype of the
    weight, stands still in bf16 after some hundred of them.
    """
    return _Embedding.apply(weight, index)
