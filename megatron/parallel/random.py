"""Random numbers that are functions of what they are for, not of what was drawn before them.

Initial weights depend on (seed, parameter name, block) and dropout on (seed, sample), so a run is the same in
every layout, and one that resumes has no generator state to restore.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch

# Side of the square tiles in which a matrix is filled. A process that holds a part of a matrix needs only the
# tiles that its part touches.
TILE = 1024


def key(*parts: int | str, bits: int) -> int:
    """A number of `bits` bits that depends on all `parts`; unlike parts give unrelated numbers."""
    text = "\0".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=bits // 8).digest(), "little")


def fill_normal_(tensor: torch.Tensor, std: float, *, seed: int, name: str) -> None:
    """Fill a vector or matrix, on any device, with N(0, std²) drawn for the parameter `name`."""
    _fill_tiles_(tensor, lambda g, shape: g.standard_normal(shape, np.float32) * np.float32(std), seed, name)


def fill_uniform_(tensor: torch.Tensor, bound: float, *, seed: int, name: str) -> None:
    """Fill a vector or matrix, on any device, with values uniform on [-bound, bound) drawn for `name`."""
    _fill_tiles_(
        tensor, lambda g, shape: (g.random(shape, np.float32) * 2 - 1) * np.float32(bound), seed, name
    )


def _fill_tiles_(tensor: torch.Tensor, draw, seed: int, name: str) -> None:
    matrix = tensor.view(tensor.shape[0], -1)
    rows, columns = matrix.shape
    for i in range(math.ceil(rows / TILE)):
        for j in range(math.ceil(columns / TILE)):
            tile = matrix[i * TILE : (i + 1) * TILE, j * TILE : (j + 1) * TILE]
            generator = np.random.Generator(np.random.Philox(key=key("init", seed, name, i, j, bits=128)))
            tile.copy_(torch.from_numpy(draw(generator, tuple(tile.shape))))


def seed_dropout(seed: int, sample: int) -> None:
    """Seed torch's generators, which dropout draws from, for the microbatch that begins with `sample`.

    `sample` is the position of the microbatch's first sample in the whole run's order of samples.
    """
    # torch takes seeds of 64 bits; one bit less keeps the value a positive signed number on every version.
    torch.manual_seed(key("dropout", seed, sample, bits=64) >> 1)
