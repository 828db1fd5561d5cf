"""Cross entropy of a softmax over the vocabulary, whole or split by tensor parallelism (arXiv 1909.08053 section 3)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.parallel.collectives import all_reduce_max, reduce_from
from megatron.parallel.mesh import ALONE, Axis


def cross_entropy(logits: Tensor, labels: Tensor, *, vocab_size: int, axis: Axis = ALONE) -> Tensor:
    """-log softmax(logits)[label] in fp32: logits [..., v] and labels [...] to [...].

    Args:
        logits: this rank's equal part of the columns of the padded vocabulary.
        vocab_size: columns of the whole vocabulary that are not padding.
        axis: ranks that the columns are split over.
    """
    if axis.size == 1:
        valid = logits[..., :vocab_size].flatten(0, -2).float()
        return F.cross_entropy(valid, labels.flatten(), reduction="none").view(labels.shape)
    width = logits.shape[-1]
    begin = axis.rank * width
    is_padding = torch.arange(begin, begin + width, device=logits.device) >= vocab_size
    x = logits.float().masked_fill(is_padding, -torch.inf)
    x = x - all_reduce_max(x.detach().amax(-1), axis).unsqueeze(-1)
    elsewhere = (labels < begin) | (labels >= begin + width)
    index = (labels - begin).masked_fill(elsewhere, 0).unsqueeze(-1)
    label_logit = x.gather(-1, index).squeeze(-1).masked_fill(elsewhere, 0.0)
    label_logit, sum_exp = reduce_from(torch.stack((label_logit, x.exp().sum(-1))), axis)
    return sum_exp.log() - label_logit
