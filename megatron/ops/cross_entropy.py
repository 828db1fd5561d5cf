"""Cross entropy of a softmax over the vocabulary, whole or divided (arXiv 1909.08053 section 3)."""

from __future__ import annotations

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
        logits: this process's equal part of the padded vocabulary's columns.
        vocab_size: columns of the whole that take part; those after them are padding.
        axis: the processes that the columns are divided among.
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
    """Two all-reduces of [...]: the largest logit; the label's logit with the sum of exponentials."""

    @staticmethod
    def forward(
        ctx, logits: Tensor, labels: Tensor, vocab_size: int, axis: Axis, label_smoothing: float
    ) -> Tensor:
        width = logits.shape[-1]
        begin = axis.rank * width
        real = min(max(vocab_size - begin, 0), width)  # columns here that are not padding
        x = logits.float()
        if real < width:
            x = x.masked_fill(torch.arange(width, device=x.device) >= real, -torch.inf)
        x = x - all_reduce_max(x.amax(-1), axis).unsqueeze(-1)
        elsewhere = (labels < begin) | (labels >= begin + width)
        index = (labels - begin).masked_fill(elsewhere, 0).unsqueeze(-1)
        parts = [x.gather(-1, index).squeeze(-1).masked_fill(elsewhere, 0.0)]
        if label_smoothing:
            parts.append(x[..., :real].sum(-1))
        exp = x.exp_()
        parts.append(exp.sum(-1))
        sums = all_reduce_sum(torch.stack(parts), axis)
        log_sum = sums[-1].log()
        losses = log_sum - sums[0]
        if label_smoothing:
            losses = (1 - label_smoothing) * losses + label_smoothing * (log_sum - sums[1] / vocab_size)
        ctx.save_for_backward(exp.div_(sums[-1].unsqueeze(-1)), index, elsewhere)
        ctx.dtype, ctx.real, ctx.smoothing, ctx.vocab_size = logits.dtype, real, label_smoothing, vocab_size
        return losses

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        softmax, index, elsewhere = ctx.saved_tensors
        # Softmax is not needed again, so its memory becomes the gradient's.
        here = (elsewhere.logical_not().float() * (ctx.smoothing - 1)).unsqueeze(-1)
        softmax.scatter_add_(-1, index, here)
        if ctx.smoothing:
            softmax[..., : ctx.real] -= ctx.smoothing / ctx.vocab_size
        return softmax.mul_(grad.unsqueeze(-1)).to(ctx.dtype), None, None, None, None
