"""Overlap of tensor-parallel communication with matrix products in forward (--tp-comm-overlap).

The input or the output of a split layer is divided along the sequence. While one piece is gathered or summed over the
ranks, the product of another is computed. Backward overlaps without this: a product that does not need the result of a
communication runs beside it (`model/layers.py`).

Shapes: s sequence, b batch, t tensor-parallel ranks, n = s / t.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from megatron.model.layers import ColumnParallelLinear, RowParallelLinear, _Linear
from megatron.ops.backend import Ops
from megatron.parallel.collectives import (
    Pending,
    all_gather,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from megatron.parallel.mesh import ALONE, Axis
from megatron.parallel.parameters import main_grad
from megatron.performance.config import PerformanceConfig
from megatron.training.loop import Hook, Trainer

# The first piece of a gather and the last one of a sum have nothing to overlap with.
PIECES = 4


class TPCommOverlap(Hook):
    """Overlap communication of split layers with their products (--tp-comm-overlap)."""

    def during_run(self, trainer: Trainer) -> AbstractContextManager[object]:
        if trainer.config.plugin(PerformanceConfig).tp_comm_overlap:
            overlap(trainer.engine.modules)
        return nullcontext()


def overlap(modules: Iterable[nn.Module]) -> None:
    """Replace the forward passes of split linear layers that communicate."""
    for layer in (layer for module in modules for layer in module.modules()):
        if isinstance(layer, ColumnParallelLinear) and layer.context.sequence_parallel:
            layer.forward = functools.partial(column_forward, layer)  # type: ignore[method-assign]
        elif isinstance(layer, RowParallelLinear):
            layer.forward = functools.partial(row_forward, layer)  # type: ignore[method-assign]


def column_forward(layer: ColumnParallelLinear, x: Tensor) -> Tensor:
    """`ColumnParallelLinear.forward` with sequence parallelism."""
    ops, tp = layer.context.ops, layer.context.tp
    return ops.communicate(_linear, _ColumnLinear, x, layer.weight, layer.bias, tp, True, ops)


def row_forward(layer: RowParallelLinear, x: Tensor) -> Tensor:
    """`RowParallelLinear.forward`."""
    ops, tp = layer.context.ops, layer.context.tp
    y = ops.communicate(_linear, _RowLinear, x, layer.weight, None, tp, layer.context.sequence_parallel, ops)
    return y if layer.bias is None else y + ops.accumulating(layer.bias)[0]


def _linear(
    function: type[_ColumnLinear | _RowLinear],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    axis: Axis,
    sequence_parallel: bool,
    ops: Ops,
) -> Tensor:
    if torch.is_grad_enabled():
        return function.apply(x, weight, bias, axis, sequence_parallel, ops)
    return function.product(x, weight, bias, axis, sequence_parallel)


def save(ctx: Any, x: Tensor, weight: Tensor, axis: Axis, sequence_parallel: bool, ops: Ops) -> None:
    """Save what `_Linear.backward` reads."""
    ctx.axis, ctx.sequence_parallel, ctx.ops = axis, sequence_parallel, ops
    ctx.main_grad = main_grad(weight)
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)


class _ColumnLinear(_Linear):
    """x Wᵀ + b for a column-parallel W and a rank's part [n, b, inputs] of x."""

    @staticmethod
    def product(x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis, _: bool) -> Tensor:
        return gathered_product(x, weight, bias, axis)

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        axis: Axis,
        sequence_parallel: bool,
        ops: Ops,
    ) -> Tensor:
        save(ctx, x, weight, axis, sequence_parallel, ops)
        return gathered_product(x, weight, bias, axis)


class _RowLinear(_Linear):
    """x Wᵀ for a row-parallel W, summed over the ranks."""

    @staticmethod
    def product(x: Tensor, weight: Tensor, _: Tensor | None, axis: Axis, sequence_parallel: bool) -> Tensor:
        return (scattered_product if sequence_parallel else summed_product)(x, weight, axis)

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        axis: Axis,
        sequence_parallel: bool,
        ops: Ops,
    ) -> Tensor:
        # Backward of the product needs no communication after the gradient has been gathered.
        save(ctx, x, weight, ALONE, False, ops)
        ctx.gather_axis = axis if sequence_parallel else ALONE
        return _RowLinear.product(x, weight, bias, axis, sequence_parallel)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _Linear.backward(ctx, all_gather(grad.contiguous(), ctx.gather_axis))


def pieces(length: int) -> list[tuple[int, int]]:
    """Begin and end of each piece of a sequence."""
    count = min(PIECES, length)
    return [(i * length // count, (i + 1) * length // count) for i in range(count)]


def gathered_product(x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis) -> Tensor:
    """All-gather x [n, b, inputs] along the sequence, and multiply it: [s, b, outputs]."""
    n, b, _ = x.shape
    size, outputs = axis.size, weight.shape[0]
    weights = weight.t().expand(size, -1, -1)
    out = x.new_empty(size, n * b, outputs)
    gathers = [(begin, end, start_all_gather(x[begin:end], axis)) for begin, end in pieces(n)]
    for begin, end, gather in gathers:
        piece, part = gather.wait().view(size, (end - begin) * b, -1), out[:, begin * b : end * b]
        if bias is None:
            torch.bmm(piece, weights, out=part)
        else:
            torch.baddbmm(bias, piece, weights, out=part)
    return out.view(size * n, b, outputs)


def scattered_product(x: Tensor, weight: Tensor, axis: Axis) -> Tensor:
    """Multiply x [s, b, inputs], and reduce-scatter the product along the sequence: [n, b, outputs]."""
    s, b, inputs = x.shape
    size, outputs = axis.size, weight.shape[0]
    weights = weight.t().expand(size, -1, -1)
    by_rank, out = x.reshape(size, s // size * b, inputs), x.new_empty(s // size, b, outputs)
    sums: list[Pending] = []
    for begin, end in pieces(s // size):
        product = torch.bmm(by_rank[:, begin * b : end * b], weights)
        sums.append(start_reduce_scatter(product.view(-1, b, outputs), axis, out=out[begin:end]))
    for pending in sums:
        pending.wait()
    return out


def summed_product(x: Tensor, weight: Tensor, axis: Axis) -> Tensor:
    """Multiply x [s, b, inputs], and all-reduce the product: [s, b, outputs]."""
    out = x.new_empty(*x.shape[:2], weight.shape[0])
    sums: list[Pending] = []
    for begin, end in pieces(len(x)):
        torch.mm(x[begin:end].flatten(0, 1), weight.t(), out=out[begin:end].flatten(0, 1))
        sums.append(start_all_reduce(out[begin:end], axis))
    for pending in sums:
        pending.wait()
    return out
