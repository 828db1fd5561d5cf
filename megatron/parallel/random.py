"""Random numbers that are functions of what they are for, not of what was drawn before them.

Initial weights depend on (seed, parameter name, block) and dropout on (seed, sample, place in the model), so a run
is the same in every layout, a layer that is computed again drops the same values, and a run that resumes has no
generator state to restore.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

from megatron.parallel.slices import GlobalSlice

# Side of the square tiles in which a matrix is filled. A process that holds a part of a matrix needs only the
# tiles that its part touches.
TILE = 1024


def key(*parts: int | str, bits: int) -> int:
    """A number of `bits` bits that depends on all `parts`; unlike parts give unrelated numbers."""
    text = "\0".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=bits // 8).digest(), "little")


def fill_normal_(tensor: torch.Tensor, std: float, place: GlobalSlice, *, seed: int, name: str) -> None:
    """Fill `tensor`, the part `place` of a vector or matrix, with N(0, std²) drawn for the parameter `name`."""

    def draw(generator: np.random.Generator, tile: tuple[int, int]) -> np.ndarray:
        return generator.standard_normal(tile, np.float32) * np.float32(std)

    _fill_tiles_(tensor, draw, place, seed, name)


def fill_uniform_(tensor: torch.Tensor, bound: float, place: GlobalSlice, *, seed: int, name: str) -> None:
    """Fill with values uniform on [-bound, bound); otherwise as `fill_normal_`."""

    def draw(generator: np.random.Generator, tile: tuple[int, int]) -> np.ndarray:
        return (generator.random(tile, np.float32) * 2 - 1) * np.float32(bound)

    _fill_tiles_(tensor, draw, place, seed, name)


def _fill_tiles_(tensor: torch.Tensor, draw: Callable, place: GlobalSlice, seed: int, name: str) -> None:
    rows, columns = place.shape[0], math.prod(place.shape[1:])
    matrix = tensor.view(tensor.shape[0], -1)
    done = 0
    for begin, end in place.ranges:
        # The rows and columns of the whole that are wanted, and where they go.
        (top, bottom), (left, right) = (
            ((begin, end), (0, columns)) if place.dim == 0 else ((0, rows), (begin, end))
        )
        target = matrix.narrow(place.dim, done, end - begin)
        done += end - begin
        for i in range(top // TILE * TILE, bottom, TILE):
            for j in range(left // TILE * TILE, right, TILE):
                tile_key = key("init", seed, name, i // TILE, j // TILE, bits=128)
                generator = np.random.Generator(np.random.Philox(key=tile_key))
                tile = torch.from_numpy(draw(generator, (min(TILE, rows - i), min(TILE, columns - j))))
                r, r_end = max(i, top), min(i + TILE, bottom)
                c, c_end = max(j, left), min(j + TILE, right)
                part = target[r - top : r_end - top, c - left : c_end - left]
                part.copy_(tile[r - i : r_end - i, c - j : c_end - j])


# What dropout in one microbatch depends on beside its place in the model: the run's seed, and the position of the
# microbatch's first sample in the whole run's order of samples. None where nothing is dropped.
DropoutKey = tuple[int, int] | None


def seed_dropout(device: torch.device, dropout_key: DropoutKey, *place: int | str) -> None:
    """Seed torch's generator of a device, from which dropout draws, for one place in the model.

    Processes that hold the same activations name the same place; those that hold parts of them, different ones.
    """
    if dropout_key is not None:
        cuda = device.type == "cuda"
        generator = torch.cuda.default_generators[device.index] if cuda else torch.default_generator
        # torch takes seeds of 64 bits; one bit less keeps the value a positive signed number on every version.
        # torch.manual_seed would look for devices of every kind, which takes 70 times as long.
        generator.manual_seed(key("dropout", *dropout_key, *place, bits=64) >> 1)


def dropout(x: torch.Tensor, p: float, dropout_key: DropoutKey, *place: int | str) -> torch.Tensor:
    """Dropout with values that depend on `dropout_key` and the place in the model alone."""
    if p == 0.0 or dropout_key is None:
        return x
    seed_dropout(x.device, dropout_key, *place)
    return F.dropout(x, p)
