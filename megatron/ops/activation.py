"""Activations of the MLP."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor


def gelu(x: Tensor) -> Tensor:
    """x Φ(x) (arXiv 1606.08415)."""
    return F.gelu(x)


def gelu_tanh(x: Tensor) -> Tensor:
    """The approximation of `gelu` by tanh, as in GPT-2."""
    return F.gelu(x, approximate="tanh")


# By name. `megatron.variants.registry` adds others.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": gelu, "gelu_tanh": gelu_tanh}


def activation(x: Tensor, name: str) -> Tensor:
    """The function of `ACTIVATIONS`."""
    return ACTIVATIONS[name](x)
