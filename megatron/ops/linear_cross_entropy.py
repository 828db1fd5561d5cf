"""Fused linear cross entropy: output layer and loss in one, on chunks of the logits.

Logits are the largest activation of a language model: 51,200 for every token. Here only a chunk of them exists at a
time, and none in fp32 if the functions are compiled. Forward computes the gradients too if it knows that of each loss;
otherwise backward computes the logits again.

With a split vocabulary, two all-reduces of numbers per token combine the softmax (arXiv 1909.08053 section 3): the
maximum; then the sum of exponentials and the label's logit.

Shapes in names: s sequence, b batch, h hidden, v vocabulary of this rank, n = s b.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron.ops.compiler import LOG2_E, CompileFn, eager
from megatron.ops.config import LOGITS_CHUNK_BYTES, LOGITS_PIECE_BYTES
from megatron.ops.linear import AccumulateWgrad, Matmul, accumulate_wgrad, matmul
from megatron.parallel.collectives import (
    all_gather,
    all_reduce_max,
    all_reduce_sum,
    start_all_reduce,
    start_reduce_scatter,
)
from megatron.parallel.mesh import Axis
from megatron.parallel.parameters import main_grad


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearCrossEntropy:
    """-log softmax(x Wᵀ + b)[label], by default in plain PyTorch.

    Attributes:
        chunk_bytes: bytes of logits that may exist at a time.
        piece_bytes: bytes that a function works on. If it is not compiled, it has them in fp32, twice.
        run: calls the functions between the products.
        matmul: computes x Wᵀ + b.
        accumulate_wgrad: adds to a `main_grad`.
        softcap: c, if the logits are c tanh((x Wᵀ + b) / c).
    """

    chunk_bytes: int = LOGITS_CHUNK_BYTES["cpu"]
    piece_bytes: int = LOGITS_PIECE_BYTES["cpu"]
    run: CompileFn = eager
    matmul: Matmul = matmul
    accumulate_wgrad: AccumulateWgrad = accumulate_wgrad
    softcap: float | None = None

    def __call__(
        self,
        x_sbh: Tensor,
        weight_vh: Tensor,
        bias_v: Tensor | None,
        labels_sb: Tensor,
        grad_sb: Tensor | None = None,
        *,
        vocab_size: int,
        axis: Axis,
        sequence_parallel: bool,
    ) -> Tensor:
        """Losses in fp32, [s, b].

        Args:
            x_sbh: with `sequence_parallel`, this rank's part of s.
            weight_vh: this rank's equal part of the rows of the padded vocabulary, like `bias_v`.
            grad_sb: the gradient that backward will have for each loss, if it is known.
            vocab_size: rows of the whole vocabulary that are not padding.
            axis: ranks that the rows are split over.

        Raises:
            RuntimeError: in backward, if the gradient is not `grad_sb`.
        """
        begin, rows = axis.rank * len(weight_vh), len(weight_vh)
        index = labels_sb.flatten() - begin
        # Labels in the rows of other ranks have no column here.
        index = index.masked_fill((index < 0) | (index >= rows), -1)
        valid = _valid_columns(weight_vh, min(max(vocab_size - begin, 0), rows))
        grad = grad_sb.flatten() if grad_sb is not None and torch.is_grad_enabled() else None
        chunks = _Chunks(self, axis, sequence_parallel, index, valid)
        return _LinearCrossEntropy.apply(x_sbh, weight_vh, bias_v, grad, chunks).view(labels_sb.shape)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_sbh: Tensor, weight: Tensor, bias: Tensor | None, known: Tensor | None, chunks: _Chunks
    ) -> Tensor:
        losses, gradients = chunks.compute(x_sbh, weight, bias, known)
        ctx.chunks = chunks
        ctx.save_for_backward(*gradients or (x_sbh, weight, bias), known)
        return losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, known = ctx.saved_tensors
        if known is None:
            return *ctx.chunks.compute(*tensors, grad)[1], None, None
        as_told = ((grad == known) | ~grad.isfinite()).all()
        torch._assert_async(as_told, "a loss has another gradient than its forward was given (grad_sb)")
        # A loss that is not finite makes the gradient so too.
        return tensors[0] * (1 + 0 * grad.sum()).to(tensors[0].dtype), *tensors[1:], None, None


@dataclasses.dataclass(frozen=True)
class _Chunks:
    """Losses and gradients by chunks of the logits.

    Attributes:
        index: [n] column of each label, or -1.
        valid: that of `_valid_columns`.
    """

    ops: LinearCrossEntropy
    axis: Axis
    sequence_parallel: bool
    index: Tensor
    valid: Tensor | None

    def compute(
        self, x_sbh: Tensor, weight: Tensor, bias: Tensor | None, grad: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """Losses, [n], and if `grad`, the gradient of each, is known, the gradients of the other arguments."""
        ops, axis = self.ops, self.axis
        x = (all_gather(x_sbh, axis) if self.sequence_parallel else x_sbh).flatten(0, 1)
        losses = torch.empty_like(self.index, dtype=torch.float32)
        grad_x, grad_weight, grad_bias = torch.empty_like(x), None, None

        # A function, so that the logits of a chunk are freed before those of the next exist.
        def compute_chunk(part: slice) -> None:
            nonlocal grad_weight, grad_bias
            logits = ops.matmul(x[part], weight, bias)
            if ops.softcap is not None:
                logits.div_(ops.softcap).tanh_().mul_(ops.softcap)
            log_sum, label_logit = self._log_sum(logits, self.index[part])
            losses[part] = log_sum - label_logit
            if grad is None:
                return
            for piece in self._pieces(logits, log_sum, grad[part], self.index[part]):
                ops.run(_logits_to_grad, *piece, self.valid, ops.softcap)
            grad_x[part] = ops.matmul(logits, weight.t(), None)
            if (total := main_grad(weight)) is None:
                grad_weight = _add(grad_weight, logits.t() @ x[part])
            else:
                ops.accumulate_wgrad(total, logits.t(), x[part])
            if bias is not None:
                grad_bias = _add(grad_bias, logits.sum(0))

        rows = max(ops.chunk_bytes // (len(weight) * weight.element_size()), 1)
        for begin in range(0, max(len(x), 1), rows):
            compute_chunk(slice(begin, begin + rows))
        if grad is None:
            return losses, ()
        start = start_reduce_scatter if self.sequence_parallel else start_all_reduce
        return losses, (start(grad_x.view(-1, *x_sbh.shape[1:]), axis).wait(), grad_weight, grad_bias)

    def _log_sum(self, logits: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Logarithm of each row's sum of exponentials over all ranks, and the label's logit."""
        statistics = [self.ops.run(_statistics, *piece, self.valid) for piece in self._pieces(logits, index)]
        local_max, exp_sum, picked = (torch.cat(values) for values in zip(*statistics, strict=True))
        maximum = all_reduce_max(local_max.clone(), self.axis)
        sums = all_reduce_sum(torch.stack((exp_sum * (local_max - maximum).exp(), picked)), self.axis)
        return sums[0].log() + maximum, sums[1]

    def _pieces(self, logits: Tensor, *by_row: Tensor) -> Iterator[tuple[Tensor, ...]]:
        rows = max(self.ops.piece_bytes // (logits.shape[1] * logits.element_size()), 1)
        return zip(*(tensor.split(rows) for tensor in (logits, *by_row)), strict=True)


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
    # In this form torch.compile reads the logits once, for the maximum and the sum ("online softmax").
    maximum = x.amax(-1, keepdim=True)
    exp_sum = (x - maximum).exp_().sum(-1, keepdim=True)
    picked = x.gather(-1, index.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return maximum.squeeze(-1), exp_sum.squeeze(-1), torch.where(index >= 0, picked, 0.0)


def _logits_to_grad(
    logits: Tensor, log_sum: Tensor, grad: Tensor, index: Tensor, valid: Tensor | None, softcap: float | None
) -> None:
    """Replace logits by the gradient of the loss, (softmax - one at the label) · grad · derivative of the soft cap."""
    x = logits.float()
    slope = None if softcap is None else 1 - (x / softcap).square()
    if valid is not None:
        x = torch.where(valid, x, -torch.inf)
    column = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    hit = column == index.to(torch.int32).unsqueeze(-1)
    x.sub_(log_sum.unsqueeze(-1)).mul_(LOG2_E).exp2_().sub_(hit.float()).mul_(grad.unsqueeze(-1))
    if slope is not None:
        x.mul_(slope)
    logits.copy_(x)
