"""A stand-in for FlashAttention on a GPU, which reads the memory of its inputs as torch's CUDA kernel does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megatron.context_parallel import kernels


@contextmanager
def on_a_gpu(capability: tuple[int, int] = (8, 0)) -> Iterator[tuple[mock.Mock, mock.Mock]]:
    """Context in which parts of attention take the path of a GPU; yields the stand-ins of forward and backward."""
    forward, backward = mock.Mock(side_effect=_forward), mock.Mock(side_effect=_backward)
    aten = mock.Mock(
        spec_set=["_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"],
        _scaled_dot_product_flash_attention=forward,
        _scaled_dot_product_flash_attention_backward=backward,
    )
    with (
        mock.patch.object(kernels, "aten", aten),
        mock.patch.object(kernels, "_takes_cpu_flash", lambda q, v: False),
        mock.patch.object(torch.cuda, "get_device_capability", lambda device: capability),
    ):
        yield forward, backward


def _forward(q: Tensor, k: Tensor, v: Tensor, dropout: float, causal: bool) -> tuple[Any, ...]:
    """`mha_fwd` of torch's flash_api.cpp."""
    _check(q, k, v, v)
    return *kernels.plain_partial_attention(q, k, v, None, causal=causal), None, None


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """`mha_bwd` of torch's flash_api.cpp, which reads the lse at (b · n + head) · s + query."""
    _, _, queries, keys, dropout, causal, *_ = others
    _check(q, k, v, out)
    assert (queries, keys, dropout, lse.dtype) == (q.shape[2], k.shape[2], 0.0, torch.float32)
    heads = lse.shape[1]
    in_memory = lse.as_strided(lse.shape, (heads * queries, queries, 1))
    return kernels.plain_partial_attention_backward(grad, q, k, v, out, in_memory, None, causal=causal)


def _check(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    """Check what the kernel asks of its inputs: 16 bits, a width, and rows that begin at multiples of 16 bytes."""
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert q.shape[-1] == k.shape[-1] == v.shape[-1] == out.shape[-1] <= 256 and q.shape[-1] % 8 == 0
    for x in (q, k, v):
        *strides, last = x.stride()
        assert last == 1 and all(step % 8 == 0 for step in (*strides, x.storage_offset()))
