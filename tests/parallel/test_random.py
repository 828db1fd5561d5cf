"""Random numbers keyed by their purpose, independent of the layout."""

from __future__ import annotations

import itertools

import pytest
import torch

from megatron.data.zigzag import Zigzag
from megatron.parallel.mesh import ALONE, Axis
from megatron.parallel.parameters import normal, xavier_uniform
from megatron.parallel.random import TILE, DropoutKey, dropout, stable_hash
from megatron.parallel.slices import GlobalSlice, whole
from megatron.performance.compiled_layer import device_keys


def test_keys_depend_on_every_part() -> None:
    keys = {
        stable_hash(*parts, bits=64)
        for parts in (("a", 1), ("a", 2), ("b", 1), ("a1",), ("a", "1", 1), (1, "a"))
    }
    assert len(keys) == 6
    assert stable_hash("init", 1234, "x", 0, 0, bits=128) < 2**128


def test_rows_do_not_depend_on_how_many_follow() -> None:
    """Vocabulary padding must not change the rows of real tokens."""
    short, long = torch.empty(1500, 20), torch.empty(2600, 20)
    normal(0.5)(short, whole(*short.shape), 1, "w")
    normal(0.5)(long, whole(*long.shape), 1, "w")
    assert torch.equal(short, long[:1500])
    assert abs(long.std().item() - 0.5) < 0.01


def test_tiles_differ_along_both_dimensions() -> None:
    """Initial values that repeat along a dimension would give a layer equal rows or columns."""
    matrix = torch.empty(2 * TILE, 2 * TILE)
    normal(1.0)(matrix, whole(*matrix.shape), 1, "w")
    tiles = [tile for rows in matrix.chunk(2) for tile in rows.chunk(2, dim=1)]
    for a, b in itertools.combinations(tiles, 2):
        assert abs(torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1]) < 0.1


def test_names_and_seeds_change_the_values() -> None:
    tensors = [torch.empty(8, 8) for _ in range(3)]
    for tensor, (seed, name) in zip(tensors, ((1, "a"), (1, "b"), (2, "a")), strict=True):
        normal(1.0)(tensor, whole(*tensor.shape), seed, name)
    assert not torch.equal(tensors[0], tensors[1])
    assert not torch.equal(tensors[0], tensors[2])


def test_uniform_keeps_its_bound() -> None:
    tensor = torch.empty(300, 300)
    xavier_uniform(48, 48)(tensor, whole(*tensor.shape), 1, "u")  # bound 0.25
    assert tensor.abs().max() <= 0.25
    assert abs(tensor.std().item() - 0.25 / 3**0.5) < 0.002


def test_values_are_pinned() -> None:
    """A change of these values would change every run's initial weights."""
    tensor = torch.empty(4)
    normal(1.0)(tensor, whole(*tensor.shape), 1234, "embedding.word_embeddings.weight")
    assert tensor.tolist() == [
        -1.3430126905441284,
        -0.3162780702114105,
        1.1118078231811523,
        -0.8760310411453247,
    ]
    xavier_uniform(3, 3)(tensor, whole(*tensor.shape), 1234, "embedding.word_embeddings.weight")  # bound 1
    assert tensor.tolist() == [
        0.935562014579773,
        -0.7445403337478638,
        0.10779714584350586,
        0.6676846742630005,
    ]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("ranges", [((0, 700),), ((1000, 1100), (1500, 2500)), ((2047, 2049),)])
def test_a_slice_has_the_values_of_the_whole(dim: int, ranges: tuple) -> None:
    shape = (2600, 40) if dim == 0 else (40, 2600)
    tensor = torch.empty(shape)
    normal(1.0)(tensor, whole(*shape), 1, "w")
    shard_spec = GlobalSlice(shape, dim, ranges)
    part = torch.empty(shard_spec.local_shape)
    normal(1.0)(part, shard_spec, 1, "w")
    assert torch.equal(part, torch.cat([tensor.narrow(dim, b, e - b) for b, e in ranges], dim=dim))


def test_dropout_is_a_function_of_seed_sample_and_location() -> None:
    def draw(seed: int, sample: int, site: str, layer: int) -> torch.Tensor:
        DropoutKey(seed, sample).at_layer(layer).seed_generator(torch.device("cpu"), site)
        return torch.rand(5)

    first = draw(1, 0, "hidden", 0)
    assert not torch.equal(first, draw(1, 1, "hidden", 0))
    assert not torch.equal(first, draw(2, 0, "hidden", 0))
    assert not torch.equal(first, draw(1, 0, "hidden", 1))
    assert torch.equal(first, draw(1, 0, "hidden", 0))


@pytest.mark.parametrize("counts", [False, True], ids=["drawn", "by counter"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("documents", [False, True])
def test_ranks_that_divide_a_sequence_drop_their_positions_of_it(
    size: int, counts: bool, documents: bool
) -> None:
    key, x = DropoutKey(7, 11, documents=documents), torch.randn(32, 3, 8)
    zigzag = Zigzag.of(32, size, documents=documents)
    assert zigzag.segments == 1 + documents
    if counts:
        (key,) = device_keys([key], 1, torch.device("cpu"))
    key = key.at_layer(0)
    expected = dropout(x, 0.3, key, "mlp", 0, ALONE)
    assert 0.5 < (expected != 0).float().mean() < 0.9
    for rank in range(size):
        part = dropout(zigzag.shard(x, 0, rank), 0.3, key, "mlp", 0, Axis(rank, size))
        torch.testing.assert_close(part, zigzag.shard(expected, 0, rank))
