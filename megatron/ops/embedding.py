"""Embedding lookup."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows, ctx.dtype = weight.shape[0], weight.dtype
        return F.embedding(index, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        summed = torch.ops.aten.embedding_dense_backward(grad.float(), index, ctx.rows, -1, False)
        return summed.to(ctx.dtype), None


def embedding(index: Tensor, weight: Tensor) -> Tensor:
    """weight[index]: index [...] and weight [rows, h] to [..., h].

    The gradient of each row is summed in fp32. Torch sums it in the dtype of the weight, and a bf16 sum of a frequent
    row stops growing after a few hundred terms.
    """
    return _Embedding.apply(weight, index)
