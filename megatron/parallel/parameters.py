"""Parameters that know their place in the whole model, and their initial values.

A parameter is made without values. It carries what part of the whole model's tensor of that name it is
(`place`) and the rule that gives its values (`init`), which depend on (seed, name, place) and nothing else: every
layout starts from the same model.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from megatron.parallel import random
from megatron.parallel.slices import GlobalSlice

# Fills a tensor, the slice of a whole one, in place; given the run's seed and the parameter's name.
Init = Callable[[Tensor, GlobalSlice, int, str], None]


def parameter(place: GlobalSlice, init: Init, *, tied: str | None = None) -> nn.Parameter:
    """A parameter without values that will be filled by `init`.

    Args:
        tied: name of the table that the first and the last stage of a pipeline both hold. Where the parameter
            goes by another name in its own module, it is the copy.
    """
    return _describe(nn.Parameter(torch.empty(place.local_shape)), place, init, tied)


def parameter_on(memory: Tensor, p: nn.Parameter) -> nn.Parameter:
    """The same parameter with its values in `memory`, of its shape."""
    return _describe(nn.Parameter(memory), p.place, p.init, p.tied)


def gradient_sum(p: Tensor) -> Tensor | None:
    """Where the gradient of a parameter is summed over microbatches in fp32, if it has been given memory for that."""
    return getattr(p, "gradient_sum", None)


def _describe(p: nn.Parameter, place: GlobalSlice, init: Init, tied: str | None) -> nn.Parameter:
    p.place, p.init, p.tied = place, init, tied
    return p


def zeros(tensor: Tensor, place: GlobalSlice, seed: int, name: str) -> None:
    """Biases."""
    tensor.zero_()


def ones(tensor: Tensor, place: GlobalSlice, seed: int, name: str) -> None:
    """Scales of normalisations."""
    tensor.fill_(1.0)


def normal(std: float) -> Init:
    """N(0, std²)."""

    def fill(tensor: Tensor, place: GlobalSlice, seed: int, name: str) -> None:
        random.fill_normal_(tensor, std, place, seed=seed, name=name)

    return fill


def xavier_uniform(inputs: int, outputs: int) -> Init:
    """Uniform with the variance 2 / (inputs + outputs) (Glorot and Bengio 2010, equation 16)."""
    bound = math.sqrt(6.0 / (inputs + outputs))

    def fill(tensor: Tensor, place: GlobalSlice, seed: int, name: str) -> None:
        random.fill_uniform_(tensor, bound, place, seed=seed, name=name)

    return fill
