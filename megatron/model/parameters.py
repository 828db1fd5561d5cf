"""Parameters and their initial values.

A parameter is made without values and carries the rule that gives them (`parameter.init`). The rule is applied
once the parameter has its name in the whole model, because the values depend on (seed, name) and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from megatron.parallel import random

# Fills a tensor in place, given the run's seed and the parameter's name.
Init = Callable[[Tensor, int, str], None]


def parameter(*shape: int, init: Init) -> nn.Parameter:
    """An uninitialised parameter of this shape that will be filled by `init`."""
    result = nn.Parameter(torch.empty(shape))
    result.init = init
    return result


def zeros(tensor: Tensor, seed: int, name: str) -> None:
    """Biases."""
    tensor.zero_()


def ones(tensor: Tensor, seed: int, name: str) -> None:
    """Scales of normalisations."""
    tensor.fill_(1.0)


def normal(std: float) -> Init:
    """N(0, std²)."""
    return lambda tensor, seed, name: random.fill_normal_(tensor, std, seed=seed, name=name)


def xavier_uniform(tensor: Tensor, seed: int, name: str) -> None:
    """Uniform with the variance 2 / (fan in + fan out) (Glorot and Bengio 2010, equation 16)."""
    bound = math.sqrt(6.0 / sum(tensor.shape))
    random.fill_uniform_(tensor, bound, seed=seed, name=name)
