"""Fused linear cross entropy: output layer and loss in one, on chunks of the logits.

Logits are the largest activation of a language model: 51,200 for every token. Here only a chunk of them exists at a
time, and none in fp32 if the functions are compiled; backward recomputes them. If all logits together are small, they
are kept for backward, which saves one of its four products.

With a split vocabulary, two all-reduces of numbers per token combine the softmax (arXiv 1909.08053 section 3): the
maximum; then the sum of exponentials and the label's logit.

Shapes in names: s sequence, b batch, h hidden, v vocabulary of this rank.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from megatron.ops.compiler import LOG2_E, CompileFn, eager
from megatron.ops.linear import AccumulateWgrad, Matmul, accumulate_wgrad, matmul
from megatron.parallel.collectives import (
    all_reduce_max,
    all_reduce_sum,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from megatron.parallel.mesh import Axis
from megatron.parallel.parameters import main_grad

# Pieces of a chunk that one call of a function works on. If it is not compiled, it has each in fp32, twice.
PIECES = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearCrossEntropy:
    """-log softmax(x Wᵀ + b)[label], by default in plain PyTorch.

    Attributes:
        chunk_bytes: bytes of logits that may exist at a time.
        kept_bytes: most bytes of logits that are kept for backward.
        run: calls the functions between the products.
        matmul: computes x Wᵀ + b.
        accumulate_wgrad: adds to a `main_grad`.
    """

    chunk_bytes: int
    kept_bytes: int = 0
    run: CompileFn = eager
    matmul: Matmul = matmul
    accumulate_wgrad: AccumulateWgrad = accumulate_wgrad

    def __call__(
        self,
        x_sbh: Tensor,
        weight_vh: Tensor,
        bias_v: Tensor | None,
        labels_sb: Tensor,
        *,
        vocab_size: int,
        axis: Axis,
        sequence_parallel: bool,
    ) -> Tensor:
        """Losses in fp32, [s, b].

        Args:
            x_sbh: with `sequence_parallel`, this rank's part of s.
            weight_vh: this rank's equal part of the rows of the padded vocabulary, like `bias_v`.
            vocab_size: rows of the whole vocabulary that are not padding.
            axis: ranks that the rows are split over.
        """
        keep = torch.is_grad_enabled()
        return _LinearCrossEntropy.apply(
            x_sbh, weight_vh, bias_v, labels_sb, self, vocab_size, axis, sequence_parallel, keep
        )


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_sbh: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels_sb: Tensor,
        ops: LinearCrossEntropy,
        vocab_size: int,
        axis: Axis,
        sequence_parallel: bool,
        keep: bool,
    ) -> Tensor:
        ctx.ops, ctx.axis, ctx.sequence_parallel = ops, axis, sequence_parallel
        ctx.main_grad = main_grad(weight)
        x = (start_all_gather(x_sbh, axis).wait() if sequence_parallel else x_sbh).flatten(0, 1)
        begin = axis.rank * len(weight)
        index = labels_sb.flatten() - begin
        # Labels in the rows of other ranks have no column here.
        index = index.masked_fill((index < 0) | (index >= len(weight)), -1)
        row_bytes = len(weight) * weight.element_size()
        keep = keep and len(x) * row_bytes <= ops.kept_bytes
        ctx.rows = max(len(x), 1) if keep else max(ops.chunk_bytes // row_bytes, 1)
        ctx.piece = max(ops.chunk_bytes // PIECES // row_bytes, 1)
        ctx.valid = _valid_columns(weight, min(max(vocab_size - begin, 0), len(weight)))
        statistics = []
        for part_x, part_index in zip(x.split(ctx.rows), index.split(ctx.rows), strict=True):
            logits = ops.matmul(part_x, weight, bias)
            pieces = zip(logits.split(ctx.piece), part_index.split(ctx.piece), strict=True)
            statistics += [ops.run(_statistics, *piece, ctx.valid) for piece in pieces]
        local_max, exp_sum, picked = (torch.cat(values) for values in zip(*statistics, strict=True))
        maximum = all_reduce_max(local_max.clone(), axis)
        sums = all_reduce_sum(torch.stack((exp_sum * (local_max - maximum).exp(), picked)), axis)
        log_sum = sums[0].log() + maximum
        ctx.kept = logits if keep else None
        ctx.save_for_backward(x_sbh, weight, bias, index, log_sum)
        return (log_sum - sums[1]).view(labels_sb.shape)

    @staticmethod
    def backward(ctx: Any, grad_sb: Tensor) -> tuple[Tensor | None, ...]:
        x_sbh, weight, bias, index, log_sum = ctx.saved_tensors
        ops, axis, grad = ctx.ops, ctx.axis, grad_sb.flatten()
        x = (start_all_gather(x_sbh, axis).wait() if ctx.sequence_parallel else x_sbh).flatten(0, 1)
        grad_x, grad_weight, grad_bias = torch.empty_like(x), None, None
        parts = (tensor.split(ctx.rows) for tensor in (x, grad_x, log_sum, grad, index))
        for part_x, part_grad_x, *rows in zip(*parts, strict=True):
            logits = ops.matmul(part_x, weight, bias) if ctx.kept is None else ctx.kept
            for piece in zip(*(tensor.split(ctx.piece) for tensor in (logits, *rows)), strict=True):
                ops.run(_logits_to_grad, *piece, ctx.valid)
            part_grad_x.copy_(ops.matmul(logits, weight.t(), None))
            if ctx.main_grad is None:
                grad_weight = _add(grad_weight, logits.t() @ part_x)
            else:
                ops.accumulate_wgrad(ctx.main_grad, logits.t(), part_x)
            if bias is not None:
                grad_bias = _add(grad_bias, logits.sum(0))
        ctx.kept = None
        start = start_reduce_scatter if ctx.sequence_parallel else start_all_reduce
        grad_x = start(grad_x.view(-1, *x_sbh.shape[1:]), axis).wait()
        return grad_x, grad_weight, grad_bias, *[None] * 6


def _add(total: Tensor | None, x: Tensor) -> Tensor:
    """total + x in fp32, or x alone."""
    return x if total is None else total.float().add_(x)


def _valid_columns(weight: Tensor, num_valid: int) -> Tensor | None:
    """[v], true for columns of the logits that are not padding; None if all are."""
    if num_valid == len(weight):
        return None
    return torch.arange(len(weight), device=weight.device) < num_valid


def _statistics(logits: Tensor, index: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Maximum of each row, sum of the exponentials less that, and logit at `index`, or 0 where that is -1."""
    x = logits.float()
    if valid is not None:
        x = torch.where(valid, x, -1e30)
    maximum = x.amax(-1)
    exp_sum = (x - maximum.unsqueeze(-1)).exp_().sum(-1)
    picked = x.gather(-1, index.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return maximum, exp_sum, torch.where(index >= 0, picked, 0.0)


def _logits_to_grad(
    logits: Tensor, log_sum: Tensor, grad: Tensor, index: Tensor, valid: Tensor | None
) -> None:
    """Replace logits by the gradient of the loss, (softmax - one at the label) · grad."""
    x = logits.float()
    if valid is not None:
        x = torch.where(valid, x, -torch.inf)
    column = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    hit = column == index.to(torch.int32).unsqueeze(-1)
    x.sub_(log_sum.unsqueeze(-1)).mul_(LOG2_E).exp2_().sub_(hit.float()).mul_(grad.unsqueeze(-1))
    logits.copy_(x)
