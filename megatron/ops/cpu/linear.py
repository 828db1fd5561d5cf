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
# Multiplications of an fp32 product (rows x inputs x outputs) below which torch's library is faster. A call of oneDNN
# takes 20 us longer: with one thread of an AMD EPYC oneDNN takes 3.7 times as long for 0.1 M, 1.5 for 1 M, 1.2 for 4 M,
# 1.0 for 17 M and 0.9 for 67 M.
MIN_WORK = 1 << 24
# The same for a part of a weight gradient, against the fused addmm: 2.6 times for 2 M, 1.7 for 8 M, 1.4 for 34 M.
MIN_WGRAD_WORK = 1 << 27
# oneDNN generates code for each new number of rows, which takes as long as an expert's product in bf16. An expert's
# number of rows changes at every step; rounded up to a multiple of 16 it takes few values.
EXPERT_ROWS = 16
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


def matmul_by_size(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`matmul`, by oneDNN unless it is small and in fp32."""
    small = x.dtype == torch.float32 and x.numel() * weight.shape[0] < MIN_WORK
    return (matmul if small else onednn_matmul)(x, weight, bias)


def accumulate_wgrad_by_size(main_grad: Tensor, a: Tensor, b: Tensor) -> None:
    """`accumulate_wgrad` by oneDNN for large products in fp32, in parts, since oneDNN copies a transposed operand."""
    small = a.shape[1] < WGRAD_ROWS or WGRAD_ROWS * main_grad.numel() < MIN_WGRAD_WORK
    if a.dtype != main_grad.dtype or small:
        accumulate_wgrad(main_grad, a, b)
        return
    for columns, rows in zip(a.split(WGRAD_ROWS, dim=1), b.split(WGRAD_ROWS), strict=True):
        main_grad.add_(torch.ops.mkldnn._linear_pointwise(columns, rows.t(), None, "none", [], ""))


def decode_matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`matmul`, by oneDNN for the few tokens of a decoding step: it streams an fp32 weight twice as fast as torch."""
    return (onednn_matmul if x.numel() <= MAX_DECODE_ROWS * x.shape[-1] else matmul)(x, weight, bias)
