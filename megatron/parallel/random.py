"""Random numbers that depend on their purpose, not on what was drawn before them.

Initial weights depend on (seed, parameter name, tile) and dropout on (seed, sample, site in the model). So a run is
the same in every layout (except for dropout of tensors that tensor parallelism splits), a recomputed layer drops the
same values, and there is no generator state to save.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.cores import own_cores
from megatron.data.zigzag import Zigzag
from megatron.parallel.mesh import ALONE, Axis
from megatron.parallel.slices import Block, GlobalSlice

# Side of the square tiles that a matrix is filled by. A rank draws only the tiles that its slice touches.
TILE = 1024


def stable_hash(*parts: int | str, bits: int) -> int:
    """Hash `parts` to a number of `bits` bits."""
    text = "\0".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=bits // 8).digest(), "little")


# Draws a tile of a shape.
Draw = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]


def fill_tiles_(draw: Draw, tensor: Tensor, shard: GlobalSlice, seed: int, name: str) -> None:
    """Fill `tensor`, a slice of the parameter `name`, a vector or matrix, with tiles that `draw` gives.

    Threads draw them, since numpy leaves the interpreter to others meanwhile.
    """
    rows, columns = shard.shape[0], math.prod(shard.shape[1:])
    matrix = tensor.view(tensor.shape[0], -1)

    def fill(local: Block, whole: Block, i: int, j: int) -> None:
        tile_key = stable_hash("init", seed, name, i // TILE, j // TILE, bits=128)
        generator = np.random.Generator(np.random.Philox(key=tile_key))
        tile = Block((i, min(i + TILE, rows)), (j, min(j + TILE, columns)))
        values = torch.from_numpy(draw(generator, tile.shape))
        part = tile.intersect(whole)
        assert part is not None
        inside = part.translated(tile, Block((0, 0), (0, 0)))
        matrix[part.translated(whole, local).index] = values[inside.index]

    tiles = [
        (local, whole, i, j)
        for local, whole in shard.blocks()
        for i in range(whole.rows[0] // TILE * TILE, whole.rows[1], TILE)
        for j in range(whole.columns[0] // TILE * TILE, whole.columns[1], TILE)
    ]
    if len(tiles) == 1:
        fill(*tiles[0])
        return
    with ThreadPoolExecutor(own_cores()) as pool:
        list(pool.map(fill, *zip(*tiles, strict=True)))


@dataclasses.dataclass(frozen=True)
class DropoutKey:
    """Key of the dropout in a microbatch.

    Attributes:
        seed: the run's seed.
        sample: index of the microbatch's first sample in the whole run.
        layer: number of the layer in the whole model; None outside of the layers.
        documents: attention keeps documents apart, which decides how ranks divide the positions.
    """

    seed: int
    sample: int
    layer: int | None = None
    documents: bool = False

    def at_layer(self, layer: int) -> DropoutKey:
        """The key within a layer."""
        return dataclasses.replace(self, layer=layer)

    def seed_generator(self, device: torch.device, site: str, rank: int | None = None) -> None:
        """Seed torch's generator of a device for one site, on the rank that holds this part of the activations."""
        cuda = device.type == "cuda"
        generator = torch.cuda.default_generators[device.index] if cuda else torch.default_generator
        place = [part for part in (self.layer, site, rank) if part is not None]
        # 63 bits, a positive signed number for every version of torch. torch.manual_seed looks for devices of every
        # type, which takes 70 times as long.
        generator.manual_seed(stable_hash("dropout", self.seed, self.sample, *place, bits=64) >> 1)

    def drop(self, x: Tensor, p: float, site: str, rank: int | None, cp: Axis) -> Tensor:
        """Dropout with a mask of its own at each site and, unless it is None, on each `rank`.

        The ranks of `cp` divide the first dimension of x. Each takes its positions of the mask of the whole, as bools.
        """
        self.seed_generator(x.device, site, rank)
        if cp.size == 1:
            return F.dropout(x, p)
        whole = x.new_empty(len(x) * cp.size, *x.shape[1:]).bernoulli_(1 - p)
        zigzag = Zigzag.of(len(whole), cp.size, documents=self.documents)
        return torch.where(zigzag.shard(whole, 0, cp.rank) > 0, x * x.new_ones(()).div_(1 - p), 0.0)


def dropout(
    x: Tensor, p: float, key: DropoutKey | None, site: str, rank: int | None = None, cp: Axis = ALONE
) -> Tensor:
    """Dropout that depends only on `key`, the site in the model and the positions of `cp`."""
    return x if p == 0.0 or key is None else key.drop(x, p, site, rank, cp)
