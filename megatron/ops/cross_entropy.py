"""Cross entropy of a softmax over the vocabulary."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """-log softmax(logits)[label] in fp32: logits [..., v] and labels [...] to [...]."""
    losses = F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), reduction="none")
    return losses.view(labels.shape)
