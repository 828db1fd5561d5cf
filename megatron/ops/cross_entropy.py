"""Cross entropy of a softmax over the vocabulary, whole or split by tensor parallelism (arXiv 1909.08053 section 3)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.parallel.collectives import all_reduce_max, all_reduce_sum
from megatron.parallel.mesh import ALONE, Axis


def cross_entropy(logits: Tensor, labels: Tensor, *, vocab_size: int, axis: Axis = ALONE) -> Tensor:
    """-log softmax(logits)[label] in fp32: logits [..., v] and labels [...] to [...].

    Args:
        logits: this rank's equal part of the columns of the padded vocabulary.
        vocab_size: columns of the whole vocabulary that are not padding.
        axis: ranks that the columns are split over.
    """
    if axis.size > 1:
        return _VocabParallel.apply(logits, labels, vocab_size, axis)
    valid = logits[..., :vocab_size].flatten(0, -2).float()
    return F.cross_entropy(valid, labels.flatten(), reduction="none").view(labels.shape)


class _VocabParallel(torch.autograd.Function):
    """Takes two all-reduces of [...]: the maximum; then the label's logit and the sum of exponentials."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, vocab_size: int, axis: Axis) -> Tensor:
        width = logits.shape[-1]
        begin = axis.rank * width
        num_valid = min(max(vocab_size - begin, 0), width)  # columns of this rank that are not padding
        x = logits.float()
        if num_valid < width:
            x = x.masked_fill(torch.arange(width, device=x.device) >= num_valid, -torch.inf)
        x = x - all_reduce_max(x.amax(-1), axis).unsqueeze(-1)
        elsewhere = (labels < begin) | (labels >= begin + width)
        index = (labels - begin).masked_fill(elsewhere, 0).unsqueeze(-1)
        label_logit = x.gather(-1, index).squeeze(-1).masked_fill(elsewhere, 0.0)
        exp = x.exp_()
        label_logit, sum_exp = all_reduce_sum(torch.stack([label_logit, exp.sum(-1)]), axis)
        ctx.save_for_backward(exp.div_(sum_exp.unsqueeze(-1)), index, elsewhere)
        ctx.dtype = logits.dtype
        return sum_exp.log() - label_logit

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        softmax, index, elsewhere = ctx.saved_tensors
        # The softmax is not needed again, so the gradient takes its memory.
        softmax.scatter_add_(-1, index, -elsewhere.logical_not().float().unsqueeze(-1))
        return softmax.mul_(grad.unsqueeze(-1)).to(ctx.dtype), None, None, None
