"""Linear layers and tables that are divided over the tensor-parallel axis (arXiv 1909.08053 section 3).

With sequence parallelism (arXiv 2205.05198) the activations between them are divided along the sequence, their
first dimension. Shapes in names: s sequence, b batch, h hidden; what is divided is marked in the text.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor, nn

from megatron.ops.backend import PLAIN, Ops
from megatron.ops.embedding import embedding
from megatron.parallel.collectives import (
    reduce_from,
    reduce_scatter_sequence,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from megatron.parallel.mesh import ALONE, Axis
from megatron.parallel.parameters import Init, gradient_sum, parameter, zeros
from megatron.parallel.slices import GlobalSlice, Range, whole


@dataclasses.dataclass(frozen=True)
class TensorParallel:
    """How the layers of a model are divided: over which processes, and whether along the sequence between them; and
    what computes each process's share."""

    axis: Axis = ALONE
    sequence: bool = False
    ops: Ops = PLAIN

    def part(self, total: int) -> Range:
        """This process's part of `total` rows, which the size of the axis divides."""
        each = total // self.axis.size
        return self.axis.rank * each, (self.axis.rank + 1) * each

    def replicated(self, *shape: int) -> GlobalSlice:
        """Place of a parameter that works on what lies between divided layers, and so is held by all."""
        return whole(*shape, partial=self.sequence)

    def collect(self, x: Tensor) -> Tensor:
        """Sum the shares of a divided layer's output: g, or reduce-scatter along the sequence."""
        return reduce_scatter_sequence(x, self.axis) if self.sequence else reduce_from(x, self.axis)

    @property
    def stream(self) -> int:
        """What distinguishes this process's dropout between divided layers: nothing, unless it has a part."""
        return self.axis.rank if self.sequence else 0


class _Linear(torch.autograd.Function):
    """x Wᵀ + b for some rows of W. If it is divided by rows, its input's side is f of the paper, or with sequence
    parallelism the all-gather along the sequence: backward sums the shares of x's gradient over `axis`.

    The gradient of W is added to where it is summed, if W has memory for that, and autograd is given none.
    """

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rows: tuple[Range, ...],
        axis: Axis,
        sequence: bool,
        ops: Ops,
    ) -> Tensor:
        ctx.rows, ctx.axis, ctx.sequence, ctx.ops = rows, axis, sequence, ops
        ctx.total = gradient_sum(weight)
        # Of an x that is divided the part: it is gathered again in backward.
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        return _product(x, weight, bias, rows, axis, sequence, ops)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), axis, ops = ctx.saved_tensors, ctx.axis, ctx.ops
        wants_x, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        rows = [slice(*part) for part in ctx.rows]
        grads = grad.split([part.stop - part.start for part in rows], dim=-1)
        flat_grads = [g.flatten(0, -2) for g in grads]
        # Each communication runs beside the products that do not need its result.
        gathering = start_all_gather(x, axis) if ctx.sequence and wants_weight else None
        grad_x = grad_weight = grad_bias = None
        if wants_x:
            shares = [ops.matmul(g, weight[part].t(), None) for g, part in zip(grads, rows, strict=True)]
            grad_x = functools.reduce(torch.add, shares)
        if gathering is not None:
            x = gathering.wait()
        if wants_x:
            reducing = (start_reduce_scatter if ctx.sequence else start_all_reduce)(grad_x, axis)
        if wants_weight and ctx.total is None:
            grad_weight = _of_all_rows([g.t() @ x.flatten(0, -2) for g in flat_grads], rows, weight)
        elif wants_weight:
            for g, part in zip(flat_grads, rows, strict=True):
                ops.add_product(ctx.total[part], g.t(), x.flatten(0, -2))
        if wants_bias:
            grad_bias = _of_all_rows([g.sum(0) for g in flat_grads], rows, weight)
        if wants_x:
            grad_x = reducing.wait()
        return grad_x, grad_weight, grad_bias, None, None, None, None


def _product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rows: tuple[Range, ...],
    axis: Axis,
    sequence: bool,
    ops: Ops,
) -> Tensor:
    gathered = start_all_gather(x, axis).wait() if sequence else x
    outputs = [
        ops.matmul(gathered, weight[begin:end], None if bias is None else bias[begin:end])
        for begin, end in rows
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)


def _linear(*arguments: Any) -> Tensor:
    """`_Linear`, or where nothing is trained its product alone: of single tokens the difference shows."""
    return _Linear.apply(*arguments) if torch.is_grad_enabled() else _product(*arguments)


def _of_all_rows(parts: list[Tensor], rows: list[slice], weight: Tensor) -> Tensor:
    """What is known of some rows of a weight, with zeros for the others."""
    if len(parts) == 1 and len(parts[0]) == len(weight):
        return parts[0]
    joined = parts[0].new_zeros(len(weight), *parts[0].shape[1:])
    for part, where in zip(parts, rows, strict=True):
        joined[where] = part
    return joined


def column_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tp: TensorParallel,
    rows: tuple[Range, ...] | None = None,
) -> Tensor:
    """x Wᵀ + b for this process's rows of W, or for those `rows` of them: [s, b, h] (or its part along s) to
    [s, b, outputs / size]."""
    return _linear(x, weight, bias, rows or ((0, len(weight)),), tp.axis, tp.sequence, tp.ops)


class ColumnParallelLinear(nn.Module):
    """x Wᵀ + b with W [outputs, inputs] divided by rows: every process computes some of the outputs."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        bias: bool,
        init: Init,
        tp: TensorParallel,
        ranges: tuple[Range, ...] | None = None,
        shared: tuple[Range, ...] = (),
    ) -> None:
        """`ranges` of the outputs that this process computes (default: an equal part); `shared` as in
        `GlobalSlice`, for outputs that all compute."""
        super().__init__()
        self.tp = tp
        ranges = ranges or (tp.part(outputs),)
        place = GlobalSlice((outputs, inputs), 0, ranges, shared, partial=bool(shared))
        self.weight = parameter(place, init)
        self.bias = parameter(dataclasses.replace(place, shape=(outputs,)), zeros) if bias else None

    def forward(self, x: Tensor, rows: tuple[Range, ...] | None = None) -> Tensor:
        """[s, b, inputs] (or its part along s) to [s, b, outputs here], or to those of `rows` alone."""
        return column_linear(x, self.weight, self.bias, self.tp, rows)


class RowParallelLinear(nn.Module):
    """x Wᵀ + b with W [outputs, inputs] divided by columns: every process reads some of the inputs."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, init: Init, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.weight = parameter(GlobalSlice((outputs, inputs), 1, (tp.part(inputs),)), init)
        self.bias = parameter(tp.replicated(outputs), zeros) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, inputs / size] to [s, b, outputs], or with sequence parallelism its part along s."""
        # Of several processes each would add it.
        fused = self.bias if self.tp.axis.size == 1 else None
        rows = ((0, len(self.weight)),)
        y = self.tp.collect(_linear(x, self.weight, fused, rows, ALONE, False, self.tp.ops))
        return y if fused is self.bias else y + self.bias


class VocabParallelEmbedding(nn.Module):
    """A table with a row for every id of the padded vocabulary, divided by rows."""

    def __init__(
        self,
        padded_vocab_size: int,
        hidden_size: int,
        *,
        real: int,
        init: Init,
        tp: TensorParallel,
        tied: str | None = None,
    ) -> None:
        """`real`: how many rows take part in the model; `tied` as for `parameter`."""
        super().__init__()
        self.tp = tp
        self.begin, self.end = tp.part(padded_vocab_size)
        self.weight = vocabulary_table(padded_vocab_size, hidden_size, real=real, init=init, tp=tp, tied=tied)

    def forward(self, ids_sb: Tensor) -> Tensor:
        """[s, b, h], or with sequence parallelism this process's part along s."""
        if self.tp.axis.size == 1:
            return embedding(ids_sb, self.weight)
        elsewhere = (ids_sb < self.begin) | (ids_sb >= self.end)
        rows = embedding((ids_sb - self.begin).masked_fill(elsewhere, 0), self.weight)
        return self.tp.collect(rows.masked_fill(elsewhere.unsqueeze(-1), 0.0))


def vocabulary_table(
    padded_vocab_size: int, hidden_size: int, *, real: int, init: Init, tp: TensorParallel, tied: str | None
) -> nn.Parameter:
    """This process's rows of a table [padded_vocab_size, hidden_size], of which `real` take part in the model."""
    place = GlobalSlice((padded_vocab_size, hidden_size), 0, (tp.part(padded_vocab_size),), real=real)
    return parameter(place, init, tied=tied)
