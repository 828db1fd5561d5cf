"""Cross entropy of a softmax over the vocabulary, whole or split by tensor parallelism (arXiv 1909.08053 section 3)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.parallel.collectives import all_reduce_max, all_reduce_sum
from megatron.parallel.mesh import ALONE, Axis


def cross_entropy(
    logits: Tensor, labels: Tensor, *, vocab_size: int, axis: Axis = ALONE, label_smoothing: float = 0.0
) -> Tensor:
    """-log softmax(logits)[label] in fp32: logits [..., v] and labels [...] to [...].

    Args:
        logits: this rank's equal part of the columns of the padded vocabulary.
        vocab_size: columns of the whole vocabulary that are not padding.
        axis: ranks that the columns are split over.
        label_smoothing: ε of (1 - ε) · -log p[label] + ε · mean of -log p.
    """
    if axis.size > 1:
        return _VocabParallel.apply(logits, labels, vocab_size, axis, label_smoothing)
    losses = F.cross_entropy(
        logits[..., :vocab_size].flatten(0, -2).float(),
        labels.flatten(),
        reduction="none",
        label_smoothing=label_smoothing,
    )
    return losses.view(labels.shape)


class _VocabParallel(torch.autograd.Function):
    """Takes two all-reduces of [...]: the maximum; then the label's logit and the sum of exponentials."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, vocab_size: int, axis: Axis, label_smoothing: float
    ) -> Tensor:
        width = logits.shape[-1]
        begin = axis.rank * width
        num_valid = min(max(vocab_size - begin, 0), width)  # columns of this rank that are not padding
        x = logits.float()
        if num_valid < width:
            x = x.masked_fill(torch.arange(width, device=x.device) >= num_valid, -torch.inf)
        x = x - all_reduce_max(x.amax(-1), axis).unsqueeze(-1)
        elsewhere = (labels < begin) | (labels >= begin + width)
        index = (labels - begin).masked_fill(elsewhere, 0).unsqueeze(-1)
        parts = [x.gather(-1, index).squeeze(-1).masked_fill(elsewhere, 0.0)]
        if label_smoothing:
            parts.append(x[..., :num_valid].sum(-1))
        exp = x.exp_()
        parts.append(exp.sum(-1))
        sums = all_reduce_sum(torch.stack(parts), axis)
        log_sum = sums[-1].log()
        losses = log_sum - sums[0]
        if label_smoothing:
            losses = (1 - label_smoothing) * losses + label_smoothing * (log_sum - sums[1] / vocab_size)
        ctx.save_for_backward(exp.div_(sums[-1].unsqueeze(-1)), index, elsewhere)
        ctx.dtype, ctx.num_valid = logits.dtype, num_valid
        ctx.smoothing, ctx.vocab_size = label_smoothing, vocab_size
        return losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        softmax, index, elsewhere = ctx.saved_tensors
        # The softmax is not needed again, so the gradient takes its memory.
        here = (elsewhere.logical_not().float() * (ctx.smoothing - 1)).unsqueeze(-1)
        softmax.scatter_add_(-1, index, here)
        if ctx.smoothing:
            softmax[..., : ctx.num_valid] -= ctx.smoothing / ctx.vocab_size
        return softmax.mul_(grad.unsqueeze(-1)).to(ctx.dtype), None, None, None, None
