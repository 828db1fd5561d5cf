"""Tensors of a machine that is not there: they have shapes, and no values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed._tools.fake_collectives  # makes communication of fake tensors known
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from megatron.training.counting import tensors_of

aten = torch.ops.aten


@contextmanager
def fake_tensors(*, gpu: bool) -> Iterator[None]:
    """Within the block tensors are fake, but for numbers that the host makes and reads.

    Their device is the CPU, for autograd refuses those of a GPU where torch has been built without CUDA. With `gpu` the
    operations are those that PyTorch chooses on one.
    """
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        _HostValues(),
        _replaced(ON_A_GPU if gpu else WITHOUT_A_FAKE),
    ):
        yield


class _HostValues(TorchDispatchMode):
    """Leaves real what torch.tensor makes, and what comes of it alone: the numbers that processes agree on."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten.lift_fresh.default:
            return args[0]
        found = tensors_of(args)
        if found and not any(isinstance(x, FakeTensor) for x in found):
            with _disable_current_modes():
                return func(*args, **kwargs)
        return func(*args, **kwargs)


@contextmanager
def _replaced(functions: dict[tuple[Any, str], Callable[..., Any]]) -> Iterator[None]:
    """Has other functions in the place of a module's.

    Not by a mode of torch's, which would not hold in backward, where layers are computed again.
    """
    originals = {(module, name): getattr(module, name) for module, name in functions}
    try:
        for (module, name), function in functions.items():
            setattr(module, name, function)
        yield
    finally:
        for (module, name), function in originals.items():
            setattr(module, name, function)


def _gpu_dropout(x: Tensor, p: float) -> Tensor:
    return torch.native_dropout(x, p, True)[0]


def _gpu_rms_norm(x: Tensor, shape: torch.Size, weight: Tensor, epsilon: float) -> Tensor:
    return _RMSNorm.apply(x, weight)


class _RMSNorm(torch.autograd.Function):
    """What torch's kernel for it keeps: its input, and a number for each position."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def _gpu_addmm(total: Tensor, a: Tensor, b: Tensor, *, out_dtype: torch.dtype, out: Tensor) -> Tensor:
    """`ops.linear.add_product_in_one`, whose precisions the fake tensors of torch 2.11 mix up: with factors of its
    result's, which take no memory."""
    element = torch.empty((), dtype=out_dtype)
    return out.addmm_(element.expand(a.shape), element.expand(b.shape))


def _gpu_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool,
) -> Tensor:
    """torch's attention by the fastest of its kernels that takes these inputs: FlashAttention no mask and no fp32, the
    memory-efficient one no groups of heads."""
    if attn_mask is None and q.dtype != torch.float32:
        return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal)[0]
    if attn_mask is not None:
        attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill_(~attn_mask, -torch.inf)
    if enable_gqa:
        return aten._scaled_dot_product_attention_math(
            q, k, v, attn_mask, dropout_p, is_causal, enable_gqa=True
        )[0]
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*q.shape[:3], k.shape[2])
    return aten._scaled_dot_product_efficient_attention(
        q, k, v, attn_mask, torch.is_grad_enabled(), dropout_p, is_causal
    )[0]


# What PyTorch has operations of its own for on a GPU.
ON_A_GPU = {
    (F, "dropout"): _gpu_dropout,
    (F, "scaled_dot_product_attention"): _gpu_attention,
    (F, "rms_norm"): _gpu_rms_norm,
    (torch, "addmm"): _gpu_addmm,
}
# A weight in an order of oneDNN's own, for one product, which fake tensors cannot have.
REORDER = (torch.ops.mkldnn, "_reorder_linear_weight")
WITHOUT_A_FAKE = {REORDER: lambda weight, rows: weight} if hasattr(*REORDER) else {}
