"""Products by oneDNN, which torch calls on a CPU for bf16 alone, and without its fused bias.

On AMD it is 1.1 to 2.2 times as fast in fp32 as the library that torch calls (benchmarks/README.md).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.ops.linear import accumulate_wgrad, matmul

# Rows of x from which on it pays to reorder the weight into oneDNN's layout first (benchmarks/README.md). The result
# has the same bits, except with a transposed weight on torch 2.11.
MIN_REORDER_ROWS = 2048
# Rows that one product of a weight gradient in fp32 sums over. For fewer, torch's fused addmm is as fast.
WGRAD_ROWS = 512
# oneDNN keeps what it prepares for each number of rows. Prompts have so many lengths that a server's memory grew from
# 0.6 to 1 GB in two minutes, so it gets only products of at most so many rows.
MAX_DECODE_ROWS = 64


def has_onednn(dtype: torch.dtype) -> bool:
    """True if this torch has oneDNN's linear product and this CPU supports it in `dtype`."""
    names = ("_linear_pointwise", "_reorder_linear_weight")
    if not torch.backends.mkldnn.is_available() or not all(hasattr(torch.ops.mkldnn, name) for name in names):
        return False
    return dtype == torch.float32 or (
        dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def onednn_matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`matmul` by oneDNN."""
    rows = x.numel() // weight.shape[1]
    if rows >= MIN_REORDER_ROWS and weight.is_contiguous():
        weight = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def onednn_accumulate_wgrad(main_grad: Tensor, a: Tensor, b: Tensor) -> None:
    """`accumulate_wgrad` by oneDNN for many rows in fp32, in parts, since oneDNN copies a transposed operand."""
    if a.dtype != main_grad.dtype or a.shape[1] < WGRAD_ROWS:
        accumulate_wgrad(main_grad, a, b)
        return
    for columns, rows in zip(a.split(WGRAD_ROWS, dim=1), b.split(WGRAD_ROWS), strict=True):
        main_grad.add_(torch.ops.mkldnn._linear_pointwise(columns, rows.t(), None, "none", [], ""))


def decode_matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`matmul`, by oneDNN for the few tokens of a decoding step: it streams an fp32 weight twice as fast as torch."""
    return (onednn_matmul if x.numel() <= MAX_DECODE_ROWS * x.shape[-1] else matmul)(x, weight, bias)
