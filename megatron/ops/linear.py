"""Products of activations with weights and with output gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

# (x, weight, bias or None) to x Wᵀ + b.
Matmul = Callable[[Tensor, Tensor, Tensor | None], Tensor]
# (main_grad, a, b): main_grad += a b.
AccumulateWgrad = Callable[[Tensor, Tensor, Tensor], None]


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b: x [..., inputs], weight [outputs, inputs] and bias [outputs] to [..., outputs]; without autograd."""
    return F.linear(x, weight, bias)


def accumulate_wgrad(main_grad: Tensor, a: Tensor, b: Tensor) -> None:
    """main_grad += a b: main_grad [m, n] in fp32, a [m, k] and b [k, n]. Fused if these are fp32 too."""
    if a.dtype == main_grad.dtype:
        main_grad.addmm_(a, b)
    else:
        main_grad.add_(a @ b)


# `torch.library.custom_op` would wrap each call in Python code that takes five times as long as this.
torch.library.define("megatron::accumulate_wgrad", "(Tensor(a!) main_grad, Tensor a, Tensor b) -> ()")
torch.library.register_fake("megatron::accumulate_wgrad", lambda main_grad, a, b: None)


@torch.library.impl("megatron::accumulate_wgrad", ("cpu", "cuda"))
def _accumulate_wgrad(main_grad: Tensor, a: Tensor, b: Tensor) -> None:
    if main_grad.is_cuda:
        torch.addmm(main_grad, a, b, out_dtype=main_grad.dtype, out=main_grad)
    else:
        accumulate_wgrad(main_grad, a, b)


def fused_accumulate_wgrad(main_grad: Tensor, a: Tensor, b: Tensor) -> None:
    """`accumulate_wgrad` as an operation that compiled code calls. On a GPU it is one kernel, which does not round the
    product to the precision of `a` and `b`."""
    torch.ops.megatron.accumulate_wgrad.default(main_grad, a, b)


def has_fused_accumulate_wgrad(dtype: torch.dtype, device: torch.device) -> bool:
    """True if this torch has the fused kernel on `device` for `dtype`."""
    if device.type != "cuda":
        return False
    main_grad, ones = torch.ones(8, 8, device=device), torch.ones(8, 8, dtype=dtype, device=device)
    try:
        fused_accumulate_wgrad(main_grad, ones, ones)
    except (RuntimeError, TypeError):  # an older torch, or an older GPU
        return False
    return bool((main_grad == 9).all())
