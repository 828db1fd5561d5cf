"""Parameters that know their shard of the whole model's tensors, and their initial values.

A parameter is created without values. Its initial values depend only on (seed, name, place in the whole tensor), so
that every layout starts from the same model.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from megatron.parallel.random import fill_tiles_
from megatron.parallel.slices import GlobalSlice

# Fills a tensor, the given slice of a whole one, in place, from the run's seed and the parameter's name.
Init = Callable[[Tensor, GlobalSlice, int, str], None]


class ShardedParameter(nn.Parameter):
    """Type of the parameters of a model. They are plain `nn.Parameter`s at run time, as torch.compile prefers.

    Attributes:
        shard_spec: part of the whole tensor that this rank holds.
        init: fills it with initial values.
        tied: name of the table, if the first and the last pipeline stage both hold it. The one that goes by another
            name in its own module is the copy.
        main_grad: fp32 memory for the gradient accumulated over microbatches, once a `ParamBuffer` holds the parameter.
        master: its fp32 master weight, if a `ParamBuffer` has one that no other rank shares.
    """

    shard_spec: GlobalSlice
    init: Init
    tied: str | None
    main_grad: Tensor | None
    master: Tensor


def parameter(shard_spec: GlobalSlice, init: Init, *, tied: str | None = None) -> ShardedParameter:
    """Create a parameter without values; the arguments are as in `ShardedParameter`."""
    return _describe(nn.Parameter(torch.empty(shard_spec.local_shape)), shard_spec, init, tied)


def parameter_on(memory: Tensor, p: ShardedParameter) -> ShardedParameter:
    """Create the same parameter with its values in `memory`, which has its shape."""
    return _describe(nn.Parameter(memory), p.shard_spec, p.init, p.tied)


def named_parameters(module: nn.Module, *, recurse: bool = True) -> Iterator[tuple[str, ShardedParameter]]:
    """Yield what `module.named_parameters` does, typed."""
    return cast(Iterator[tuple[str, ShardedParameter]], module.named_parameters(recurse=recurse))


def main_grad(p: Tensor) -> Tensor | None:
    """Return the fp32 memory for the accumulated gradient of a parameter, or None if it has none."""
    return getattr(p, "main_grad", None)


def master(p: Tensor | None) -> Tensor | None:
    """Return the fp32 master weight of a parameter if this rank holds all of it, otherwise the parameter."""
    return getattr(p, "master", p)


def _describe(p: nn.Parameter, shard_spec: GlobalSlice, init: Init, tied: str | None) -> ShardedParameter:
    p = cast(ShardedParameter, p)
    p.shard_spec, p.init, p.tied = shard_spec, init, tied
    return p


def zeros(tensor: Tensor, shard: GlobalSlice, seed: int, name: str) -> None:
    """Initialize a bias."""
    tensor.zero_()


def ones(tensor: Tensor, shard: GlobalSlice, seed: int, name: str) -> None:
    """Initialize the scale of a norm."""
    tensor.fill_(1.0)


def normal(std: float) -> Init:
    """Initialize with N(0, std²)."""

    def draw(generator: np.random.Generator, tile: tuple[int, int]) -> np.ndarray:
        return generator.standard_normal(tile, np.float32) * np.float32(std)

    return functools.partial(fill_tiles_, draw)


def xavier_uniform(inputs: int, outputs: int) -> Init:
    """Initialize uniformly with variance 2 / (inputs + outputs) (Glorot and Bengio 2010, equation 16)."""
    bound = math.sqrt(6.0 / (inputs + outputs))

    def draw(generator: np.random.Generator, tile: tuple[int, int]) -> np.ndarray:
        return (generator.random(tile, np.float32) * 2 - 1) * np.float32(bound)

    return functools.partial(fill_tiles_, draw)
