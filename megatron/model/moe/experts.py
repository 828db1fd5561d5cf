"""The experts of this rank: their weights, and the products of many experts with the tokens that chose them.

Shapes in names: m rows (a copy of a token for each expert that it chose), h hidden, f width of an expert.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.errors import InputError
from megatron.model.config import ModelConfig
from megatron.model.context import ModelContext
from megatron.model.mlp import input_init, output_init
from megatron.ops.backend import Ops
from megatron.ops.host_memory import upload
from megatron.parallel.parameters import main_grad, parameter
from megatron.parallel.slices import GlobalSlice, Range, intersections

# Rows of zeros are added where they are at most an eighth of an expert's rows, on average.
MIN_MULTIPLES = 4


class Experts(nn.Module):
    """MLPs without biases, each for the rows of its own expert.

    The rows of `weight1` [experts · f, or 2f with a gate, h] and `weight2` [experts · f, h], which is transposed, are
    those of one expert after the other. So a rank's part is ranges of rows of both: its experts (expert parallelism),
    and a part of each expert's features (tensor parallelism of experts).
    """

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        experts, f, h = config.num_experts, config.moe_ffn_hidden_size, config.hidden_size
        assert experts is not None and f is not None
        self.activation, self.ops, self.grouped = config.activation, context.ops, config.moe_grouped_gemm
        if self.grouped and not hasattr(F, "grouped_mm"):
            raise InputError("--moe-grouped-gemm: this torch has no grouped_mm; use torch 2.10 or newer")
        owners, parts = context.expert.size // context.expert_tp, context.expert_tp
        owner, part = divmod(context.expert.rank, parts)
        self.local = range(experts // owners * owner, experts // owners * (owner + 1))
        begin, end = f // parts * part, f // parts * (part + 1)
        halves = 2 if config.gated else 1
        fc1 = [
            (f * row + begin, f * row + end)
            for e in self.local
            for row in range(halves * e, halves * (e + 1))
        ]
        fc2 = [(f * e + begin, f * e + end) for e in self.local]
        spec = GlobalSlice((halves * f * experts, h), 0, _joined(fc1), expert_parallel=True, matrices=experts)
        self.weight1 = parameter(spec, input_init(config, halves * f))
        spec = dataclasses.replace(spec, shape=(f * experts, h), ranges=_joined(fc2), transposed=True)
        self.weight2 = parameter(spec, output_init(config))

    def forward(self, x_mh: Tensor, weights_m: Tensor, counts: Sequence[int] | Tensor) -> Tensor:
        """Outputs times `weights_m`, [m, h].

        Args:
            counts: number of rows of each local expert, in whose order the rows are; a tensor on their device, or known
                to the host.
        """
        counts = self.located(counts, x_mh.device)
        x_mf = self.ops.activation(
            self.product(x_mh, self.weight1, counts, transposed=False), self.activation
        )
        return self.product(
            x_mf * weights_m.unsqueeze(1).to(x_mf.dtype), self.weight2, counts, transposed=True
        )

    def located(self, counts: Sequence[int] | Tensor, device: torch.device) -> Sequence[int] | Tensor:
        """The same numbers where the products read them: on the device if they are grouped."""
        return (
            upload(torch.tensor(counts), device) if self.grouped and isinstance(counts, Sequence) else counts
        )

    def row_multiple(self, rows: int) -> int:
        """The rows of each expert are padded to a multiple of this, if the experts of this rank have `rows` in all."""
        multiple = self.ops.expert_rows
        return multiple if rows >= MIN_MULTIPLES * multiple * len(self.local) else 1

    def product(
        self, x: Tensor, weight: Tensor, counts: Sequence[int] | Tensor, *, transposed: bool
    ) -> Tensor:
        """x Wₑᵀ, or x Wₑ if W is stored transposed, for the rows of each expert e."""
        return _Product.apply(x, weight, counts, len(self.local), transposed, self.ops)


def _joined(ranges: list[Range]) -> tuple[Range, ...]:
    """The same rows in as few ranges as possible."""
    return tuple(intersections((0, ranges[-1][1]), ranges))


class _Product(torch.autograd.Function):
    """Products of groups of rows with a matrix each. The gradient of W is accumulated in its `main_grad`, if any."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        counts: Sequence[int] | Tensor,
        experts: int,
        transposed: bool,
        ops: Ops,
    ) -> Tensor:
        groups = counts.cumsum(0).to(torch.int32) if isinstance(counts, Tensor) else counts
        ctx.groups, ctx.transposed, ctx.ops = groups, transposed, ops
        ctx.shape = (experts, -1, weight.shape[1])
        ctx.main_grad = main_grad(weight)
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        by_expert = weight.view(ctx.shape)
        return _products(x, by_expert if transposed else by_expert.mT, groups)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        by_expert, grad = weight.view(ctx.shape), grad.contiguous()
        grad_x = grad_weight = None
        if ctx.needs_input_grad[1]:
            target = ctx.main_grad
            if target is None:
                target = grad_weight = torch.zeros_like(weight)
            left, right = (x, grad) if ctx.transposed else (grad, x)
            _accumulate(target.view(ctx.shape), left, right, ctx.groups, ctx.ops)
        if ctx.needs_input_grad[0]:
            other = by_expert.mT if ctx.transposed else by_expert
            grad_x = _products(grad, other, ctx.groups)
        return grad_x, grad_weight, None, None, None, None


# The end of each expert's rows for a grouped product, or the number of its rows for products one by one.
Groups = Sequence[int] | Tensor


def _products(x: Tensor, matrices: Tensor, groups: Groups) -> Tensor:
    """x Mₑ for the rows of each expert: x [m, a] and M [experts, a, b] to [m, b]."""
    if isinstance(groups, Tensor):
        return F.grouped_mm(x, matrices, offs=groups)
    out = x.new_empty(len(x), matrices.shape[2])
    for rows, result, matrix in zip(x.split(groups), out.split(groups), matrices, strict=True):
        torch.mm(rows, matrix, out=result)
    return out


def _accumulate(target: Tensor, left: Tensor, right: Tensor, groups: Groups, ops: Ops) -> None:
    """targetₑ += leftᵀ right over the rows of each expert: target [experts, a, b], left [m, a], right [m, b]."""
    if isinstance(groups, Tensor):
        target += F.grouped_mm(left.t(), right, offs=groups)
        return
    for matrix, a, b in zip(target, left.split(groups), right.split(groups), strict=True):
        if len(a):
            ops.accumulate_wgrad(matrix, a.t(), b)
