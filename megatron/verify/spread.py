"""Runs of one process that differ from it in rounding only: the sums of all products are permuted and divided.

A layout divides sums among ranks: of a row-parallel product over the hidden dimension, of a gradient over tokens and
samples. With context parallelism it divides attention too, and rounds its parts in another way than one kernel does.
Here each product sums in random order, in several parts, each rounded to the precision of the result, as if so many
ranks had computed it. So does each sum over rows, such as the gradient of a bias or of a norm's weight: sequence and
context parallelism divide the rows of a microbatch, and every rank rounds its sum. The spread of such runs is the
rounding error to expect, with its growth through the model and the optimizer.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.training.loop import Hook, Trainer

aten = torch.ops.aten
ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default
ATTENTION_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class DividedSums(Hook):
    """Run all steps with permuted and divided sums, or with products in fp64.

    Gradients that --grad-reduce-in-bf16 rounds are divided and rounded too.
    """

    def __init__(self, seed: int, parts: int) -> None:
        """`parts`: parts of each sum; 1 computes products in fp64, without permutation."""
        self.seed, self.parts = seed, parts

    @contextmanager
    def during_training(self, trainer: Trainer) -> Iterator[None]:
        generator = torch.Generator().manual_seed(self.seed)
        in_bf16 = trainer.config.parallel.grad_reduce_in_bf16 and self.parts > 1
        engine, mode = trainer.engine, SumMode(generator, self.parts)
        inner = engine.run_passes

        def run_passes(*args: Any) -> None:
            with mode:
                inner(*args)
            if in_bf16:
                rounded = [b for b in engine.buffer.buckets if not b.group.optimizer.counts]
                for param in (param for bucket in rounded for param in bucket.flat_params):
                    grad = engine.buffer.grad_memory.view(param)
                    # Two ranks' parts, which differ by the size of a typical element and may cancel.
                    scale = grad.square().mean().sqrt()
                    part = grad / 2 + scale * torch.randn(grad.shape, generator=generator)
                    grad.copy_(part.bfloat16() + (grad - part).bfloat16())

        engine.run_passes = run_passes
        try:
            yield
        finally:
            engine.run_passes = inner


class SumMode(TorchDispatchMode):
    """Context in which products and sums are computed in another order.

    Attributes:
        last_sum: the newest sum in fp32, and its parts. If it is rounded to 16 bits, the parts are, and their sum.
    """

    def __init__(self, generator: torch.Generator, parts: int) -> None:
        super().__init__()
        self.generator, self.parts = generator, parts
        self.last_sum: tuple[Tensor, list[Tensor]] | None = None
        self.replacements: dict[Any, Callable[..., Any]] = {
            aten.mm.default: self._mm,
            aten.bmm.default: self._mm,
            aten.addmm.default: self._addmm,
            aten.addmm_.default: self._addmm_,
            aten.sum.dim_IntList: self._sum,
            aten._to_copy.default: self._to_copy,
            aten.native_layer_norm_backward.default: self._layer_norm_backward,
            ATTENTION: _attention,
            ATTENTION_BACKWARD: _attention_backward,
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.replacements.get(func, func)(*args, **(kwargs or {}))

    def _pieces(self, length: int) -> list[Tensor]:
        """Indices of the terms of each part of a sum, in random order."""
        order = torch.randperm(length, generator=self.generator)
        return list(order.chunk(self.parts))

    def _mm(self, a: Tensor, b: Tensor) -> Tensor:
        if self.parts == 1:
            return (a.double() @ b.double()).to(a.dtype)
        return _total(
            [a.index_select(-1, piece) @ b.index_select(-2, piece) for piece in self._pieces(a.shape[-1])]
        )

    def _addmm(self, x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        return beta * x + alpha * self._mm(a, b)

    def _addmm_(self, x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        return x.copy_(self._addmm(x, a, b, beta=beta, alpha=alpha))

    def _sum(
        self, x: Tensor, dim: list[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
    ) -> Tensor:
        if self.parts == 1 or not dim or not x.is_floating_point():
            return aten.sum.dim_IntList(x, dim, keepdim, dtype=dtype)
        longest = max(dim, key=lambda i: x.shape[i])
        parts = [
            aten.sum.dim_IntList(x.index_select(longest, piece), dim, keepdim, dtype=dtype)
            for piece in self._pieces(x.shape[longest])
        ]
        total = _total(parts)
        self.last_sum = total, parts
        return total

    def _to_copy(self, x: Tensor, *, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
        if self.last_sum is not None and x is self.last_sum[0] and dtype in (torch.bfloat16, torch.float16):
            return _total([aten._to_copy.default(part, dtype=dtype, **options) for part in self.last_sum[1]])
        return aten._to_copy.default(x, dtype=dtype, **options)

    def _layer_norm_backward(
        self,
        grad: Tensor,
        x: Tensor,
        shape: list[int],
        mean: Tensor,
        inverse: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mask: list[bool],
    ) -> tuple[Tensor | None, ...]:
        function = functools.partial(aten.native_layer_norm_backward.default, weight=weight, bias=bias)
        grad_x, *sums = function(grad, x, shape, mean, inverse, output_mask=mask)
        rows = x.numel() // x.shape[-1]
        if self.parts == 1 or rows < 2:
            return grad_x, *sums
        by_row = [t.reshape(rows, -1) for t in (grad, x, mean, inverse)]
        parts = []
        for piece in self._pieces(rows):
            part_grad, part_x, *statistics = (t.index_select(0, piece) for t in by_row)
            parts.append(function(part_grad, part_x, shape, *statistics, output_mask=[False, *mask[1:]])[1:])
        return grad_x, *(
            _total(list(part)) if part[0] is not None else None for part in zip(*parts, strict=True)
        )


def _total(parts: list[Tensor]) -> Tensor:
    """The sum of parts, rounded to their precision after each."""
    return functools.reduce(operator.add, parts)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *arguments: Any,
    attn_mask: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Attention in 16 bits that rounds only its result: the kernel rounds the weights of values too."""
    if query.dtype == torch.float32:
        return ATTENTION(query, key, value, *arguments, attn_mask=attn_mask, **options)
    wide = [x.double() for x in (query, key, value)]
    output, logsumexp = ATTENTION(*wide, *arguments, attn_mask=_wide_mask(attn_mask), **options)
    return output.to(query.dtype), logsumexp.float()


def _attention_backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    *arguments: Any,
    attn_mask: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, ...]:
    """Backward of `_attention`."""
    tensors = (grad_output, query, key, value, output, logsumexp)
    if query.dtype == torch.float32:
        return ATTENTION_BACKWARD(*tensors, *arguments, attn_mask=attn_mask, **options)
    wide = [x.double() for x in tensors]
    grads = ATTENTION_BACKWARD(*wide, *arguments, attn_mask=_wide_mask(attn_mask), **options)
    return tuple(grad.to(query.dtype) for grad in grads)


def _wide_mask(mask: Tensor | None) -> Tensor | None:
    """A mask of scores in fp64; one of booleans as it is."""
    return mask.double() if mask is not None and mask.is_floating_point() else mask
