"""Linear layers split over the tensor-parallel axis (arXiv 1909.08053 section 3).

With sequence parallelism (arXiv 2205.05198) the input of a column-parallel layer and the output of a row-parallel layer
are split along the sequence, their first dimension. Between the two, activations are split along the hidden dimension.
Shapes in names: s sequence, b batch, h hidden.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from megatron.model.context import ModelContext
from megatron.ops.backend import Ops
from megatron.parallel.collectives import (
    all_gather,
    reduce_from,
    reduce_scatter_sequence,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from megatron.parallel.mesh import ALONE, Axis
from megatron.parallel.parameters import Init, main_grad, parameter, zeros
from megatron.parallel.slices import GlobalSlice


class ColumnParallelLinear(nn.Module):
    """x Wᵀ + b with W [out_features, in_features] split by rows: each rank computes some of the output features."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        init: Init,
        context: ModelContext,
        shard: GlobalSlice | None = None,
    ) -> None:
        """`shard`: shard spec of W, by default an equal part of its rows on each rank."""
        super().__init__()
        self.context = context
        shard = shard or GlobalSlice((out_features, in_features), 0, (context.tp.local_range(out_features),))
        self.weight = parameter(shard, init)
        self.bias = parameter(dataclasses.replace(shard, shape=(out_features,)), zeros) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, in_features], or with sequence parallelism this rank's part of s, to [s, b, out_features / size]."""
        return column_linear(x, self.weight, self.bias, self.context)


class RowParallelLinear(nn.Module):
    """x Wᵀ + b with W [out_features, in_features] split by columns: each rank reads some of the input features."""

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, init: Init, context: ModelContext
    ) -> None:
        super().__init__()
        self.context = context
        shard = GlobalSlice((out_features, in_features), 1, (context.tp.local_range(in_features),))
        self.weight = parameter(shard, init)
        self.bias = parameter(context.replicated(out_features), zeros) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, in_features / size] to [s, b, out_features], or with sequence parallelism this rank's part of s."""
        if self.context.tp.size == 1:
            return _linear(x, self.weight, self.bias, self.context.ops)
        y = reduce_output(_linear(x, self.weight, None, self.context.ops), self.context)
        return y if self.bias is None else y + self.context.ops.accumulating(self.bias)[0]


def column_linear(x: Tensor, weight: Tensor, bias: Tensor | None, context: ModelContext) -> Tensor:
    """x Wᵀ + b for this rank's rows of a column-parallel W: [s, b, in_features], or with sequence parallelism this
    rank's part of s, to [s, b, out_features / size]."""
    ops, tp = context.ops, context.tp
    if tp.size == 1:
        return _linear(x, weight, bias, ops)
    return ops.communicate(_linear, x, weight, bias, ops, tp, context.sequence_parallel)


def reduce_output(x: Tensor, context: ModelContext) -> Tensor:
    """Sum the partial outputs of all tensor-parallel ranks, [s, b, h]; with sequence parallelism reduce-scatter them
    along s."""
    reduce = reduce_scatter_sequence if context.sequence_parallel else reduce_from
    return context.ops.communicate(reduce, x, context.tp)


def _linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ops: Ops,
    axis: Axis = ALONE,
    sequence_parallel: bool = False,
) -> Tensor:
    # Without gradients the product alone: the overhead of an autograd function shows with single tokens.
    if torch.is_grad_enabled():
        bias = None if bias is None else ops.accumulating(bias)[0]
        return _Linear.apply(x, weight, bias, axis, sequence_parallel, ops)
    return ops.matmul(all_gather(x, axis) if sequence_parallel else x, weight, bias)


class _Linear(torch.autograd.Function):
    """x Wᵀ + b for a column-parallel W. Forward all-gathers x along the sequence if it is split; backward all-reduces
    (or reduce-scatters) the gradient of x over `axis`. This is f of arXiv 1909.08053, or g of 2205.05198 with sequence
    parallelism.

    If W has a `main_grad`, its gradient is accumulated there and autograd gets none.
    """

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
        ctx.axis, ctx.sequence_parallel, ctx.ops = axis, sequence_parallel, ops
        ctx.main_grad = main_grad(weight)
        # Saves only the local shard of x; backward gathers it again.
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        return ops.matmul(all_gather(x, axis) if sequence_parallel else x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), axis, ops = ctx.saved_tensors, ctx.axis, ctx.ops
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        grad_x = grad_weight = grad_bias = None
        # Each communication overlaps with the products that do not need its result.
        gathering = start_all_gather(x, axis) if ctx.sequence_parallel and needs_weight else None
        if needs_x:
            grad_x = (ops.dgrad or ops.matmul)(grad, weight.t(), None)
            if axis.size > 1:
                reducing = (start_reduce_scatter if ctx.sequence_parallel else start_all_reduce)(grad_x, axis)
        flat_grad = grad.flatten(0, -2)
        if needs_weight:
            flat_x = (x if gathering is None else gathering.wait()).flatten(0, -2)
            if ctx.main_grad is None:
                grad_weight = flat_grad.t() @ flat_x
            else:
                ops.accumulate_wgrad(ctx.main_grad, flat_grad.t(), flat_x)
        if needs_bias:
            grad_bias = flat_grad.sum(0)
        if needs_x and axis.size > 1:
            grad_x = reducing.wait()
        return grad_x, grad_weight, grad_bias, None, None, None
