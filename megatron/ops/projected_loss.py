"""The projection to the vocabulary and its cross entropy in one, some rows at a time.

Logits are the largest activation of a language model: 51,200 for every token. Here no more than `AT_ONCE` bytes of them
exist at a time, and in fp32 none where the formulas are compiled, else a few rows; backward computes them again. Where
all together are no more than `KEPT` bytes they are kept for backward, which saves a product in four.

With a divided vocabulary two all-reduces of a number per token make one softmax of the parts (arXiv 1909.08053 section
3): the largest logit, then the sum of exponentials with the label's logit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.ops.compiler import LOG2_E, Run
from megatron.ops.linear import AddProduct, Matmul
from megatron.parallel.collectives import (
    all_reduce_max,
    all_reduce_sum,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from megatron.parallel.mesh import Axis
from megatron.parallel.parameters import gradient_sum

# Bytes of logits by the kind of device.
AT_ONCE = {"cpu": 1 << 24, "cuda": 1 << 28}
KEPT = 1 << 27
# Parts of `AT_ONCE` that the formulas are given one after the other: as written they have each in fp32, twice.
PIECES = 4


def projected_loss(
    run: Run,
    matmul: Matmul,
    add_product: AddProduct,
    at_once: int,
    x_sbh: Tensor,
    weight_vh: Tensor,
    bias_v: Tensor | None,
    labels_sb: Tensor,
    *,
    vocab_size: int,
    axis: Axis,
    sequence: bool,
) -> Tensor:
    """-log softmax(x Wᵀ + b)[label] in fp32, [s, b].

    Args:
        run: what runs the formulas, `matmul` and `add_product` the products.
        at_once: bytes of logits that may exist at a time; `AT_ONCE` has what suits a device.
        x_sbh: with `sequence` this process's part along s.
        weight_vh: this process's equal part of the padded vocabulary's rows, as of `bias_v`.
        vocab_size: rows of the whole that take part; those after them are padding.
        axis: the processes that the rows are divided among.
    """
    begin = axis.rank * len(weight_vh)
    real = min(max(vocab_size - begin, 0), len(weight_vh))
    trains = torch.is_grad_enabled()
    return _ProjectedLoss.apply(
        x_sbh,
        weight_vh,
        bias_v,
        labels_sb,
        run,
        matmul,
        add_product,
        at_once,
        begin,
        real,
        axis,
        sequence,
        trains,
    )


class _ProjectedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        x_sbh: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels_sb: Tensor,
        run: Run,
        matmul: Matmul,
        add_product: AddProduct,
        at_once: int,
        begin: int,
        real: int,
        axis: Axis,
        sequence: bool,
        trains: bool,
    ) -> Tensor:
        ctx.run, ctx.matmul, ctx.real, ctx.axis, ctx.sequence = run, matmul, real, axis, sequence
        ctx.total, ctx.add_product = gradient_sum(weight), add_product
        x = (start_all_gather(x_sbh, axis).wait() if sequence else x_sbh).flatten(0, 1)
        index = labels_sb.flatten() - begin
        # Labels of other processes' rows are at no column.
        index = index.masked_fill((index < 0) | (index >= len(weight)), -1)
        row_bytes = len(weight) * weight.element_size()
        keeps = trains and len(x) * row_bytes <= KEPT
        ctx.rows = max(len(x), 1) if keeps else max(at_once // row_bytes, 1)
        ctx.piece = max(at_once // PIECES // row_bytes, 1)
        columns = _columns(weight, real)
        found = []
        for part in _parts(len(x), ctx.rows):
            logits = matmul(x[part], weight, bias)
            pieces = zip(logits.split(ctx.piece), index[part].split(ctx.piece), strict=True)
            found += [run(_statistics, *piece, columns) for piece in pieces]
        largest, exp_sum, picked = (torch.cat(values) for values in zip(*found, strict=True))
        highest = all_reduce_max(largest.clone(), axis)
        sums = all_reduce_sum(torch.stack((exp_sum * (largest - highest).exp(), picked)), axis)
        log_sum = sums[0].log() + highest
        ctx.kept = logits if keeps else None
        ctx.save_for_backward(x_sbh, weight, bias, index, log_sum)
        return (log_sum - sums[1]).view(labels_sb.shape)

    @staticmethod
    def backward(ctx, grad_sb: Tensor) -> tuple[Tensor | None, ...]:
        x_sbh, weight, bias, index, log_sum = ctx.saved_tensors
        axis, grad = ctx.axis, grad_sb.flatten()
        x = (start_all_gather(x_sbh, axis).wait() if ctx.sequence else x_sbh).flatten(0, 1)
        columns = _columns(weight, ctx.real)
        grad_x, grad_weight, grad_bias = torch.empty_like(x), None, None
        for part in _parts(len(x), ctx.rows):
            logits = ctx.matmul(x[part], weight, bias) if ctx.kept is None else ctx.kept
            rows = (logits, log_sum[part], grad[part], index[part])
            for piece in zip(*(tensor.split(ctx.piece) for tensor in rows), strict=True):
                ctx.run(_gradient, *piece, columns)
            grad_x[part] = ctx.matmul(logits, weight.t(), None)
            if ctx.total is None:
                grad_weight = _plus(grad_weight, logits.t() @ x[part])
            else:
                ctx.add_product(ctx.total, logits.t(), x[part])
            if bias is not None:
                grad_bias = _plus(grad_bias, logits.sum(0))
        ctx.kept = None
        start = start_reduce_scatter if ctx.sequence else start_all_reduce
        grad_x = start(grad_x.view(-1, *x_sbh.shape[1:]), axis).wait()
        return grad_x, grad_weight, grad_bias, *[None] * 10


def _parts(total: int, size: int) -> list[slice]:
    return [slice(begin, min(begin + size, total)) for begin in range(0, max(total, 1), size)]


def _plus(total: Tensor | None, x: Tensor) -> Tensor:
    """Their sum, in fp32 where there are two."""
    return x if total is None else total.float().add_(x)


def _columns(weight: Tensor, real: int) -> Tensor | None:
    """[v] whether a column of the logits, a row of the weight, takes part, where some do not."""
    return None if real == len(weight) else torch.arange(len(weight), device=weight.device) < real


def _statistics(logits: Tensor, index: Tensor, columns: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row the largest logit, the sum of the exponentials of all less that, and the logit at `index`, 0 where
    that is -1."""
    x = logits.float()
    if columns is not None:
        x = torch.where(columns, x, -1e30)
    largest = x.amax(-1)
    exp_sum = (x - largest.unsqueeze(-1)).exp_().sum(-1)
    picked = x.gather(-1, index.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return largest, exp_sum, torch.where(index >= 0, picked, 0.0)


def _gradient(logits: Tensor, log_sum: Tensor, grad: Tensor, index: Tensor, columns: Tensor | None) -> None:
    """Replace logits by the loss's gradient: (softmax - one at the label) · grad."""
    x = logits.float()
    if columns is not None:
        x = torch.where(columns, x, -torch.inf)
    column = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    hit = column == index.to(torch.int32).unsqueeze(-1)
    x.sub_(log_sum.unsqueeze(-1)).mul_(LOG2_E).exp2_().sub_(hit.float()).mul_(grad.unsqueeze(-1))
    logits.copy_(x)
