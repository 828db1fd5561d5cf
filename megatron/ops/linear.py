"""Products of activations with weights and with gradients, by the fastest of a device's libraries."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

# Of (x, weight, bias or None): what `matmul` gives.
Matmul = Callable[[Tensor, Tensor, Tensor | None], Tensor]
# Of (total, a, b): what `add_product` does.
AddProduct = Callable[[Tensor, Tensor, Tensor], None]

# Rows of x from which on oneDNN takes less time with a weight that is put in the order of its own first
# (benchmarks/README.md). The bits are the same, but not with a transposed weight on torch 2.11.
REORDERED = 2048
# Rows to sum over at a time, and from which on oneDNN adds a product in fp32 no slower than torch does.
SUMMED = 512


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b: x [..., inputs], weight [outputs, inputs] and bias [outputs] to [..., outputs]; without autograd."""
    return F.linear(x, weight, bias)


def onednn_matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same by oneDNN, which torch uses on a CPU for bf16 alone, and without its fused bias.

    On AMD it is 1.1 to 2.2 times as fast in fp32 as what torch calls otherwise (benchmarks/README.md).
    """
    rows = x.numel() // weight.shape[1]
    if rows >= REORDERED and weight.is_contiguous():
        weight = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def has_onednn(dtype: torch.dtype) -> bool:
    """Whether this torch has oneDNN's linear product, and this CPU is one that oneDNN can do it on in `dtype`."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    return dtype == torch.float32 or (
        dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b: total [m, n] in fp32, a [m, k] and b [k, n]; in one pass if they are in fp32 too."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total.add_(a @ b)


def onednn_add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """`add_product` by oneDNN in fp32, unless it is small. A part of `a` is copied at a time, and its product added."""
    if a.dtype != total.dtype or a.shape[1] < SUMMED:
        add_product(total, a, b)
        return
    for columns, rows in zip(a.split(SUMMED, dim=1), b.split(SUMMED), strict=True):
        total.add_(torch.ops.mkldnn._linear_pointwise(columns, rows.t(), None, "none", [], ""))


def add_product_in_one(total: Tensor, a: Tensor, b: Tensor) -> None:
    """The same on a GPU for all precisions, the product never rounded to that of `a` and `b`."""
    torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


def has_add_product_in_one(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this torch has it on a device, for factors of `dtype`."""
    if device.type != "cuda":
        return False
    total, ones = torch.ones(8, 8, device=device), torch.ones(8, 8, dtype=dtype, device=device)
    try:
        add_product_in_one(total, ones, ones)
    except (RuntimeError, TypeError):  # an older torch, or another GPU's
        return False
    return bool((total == 9).all())
