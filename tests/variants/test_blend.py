from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data.indexed_writer import IndexedDatasetWriter
from megatron.errors import InputError
from megatron.variants.blend import blend_order, load_or_build_order, open_blend
from megatron.variants.blend_flags import parse_blend


def reference(weights: np.ndarray, size: int) -> tuple[list[int], list[int]]:
    """Megatron-LM's blend, computed sample by sample."""
    shares = np.asarray(weights, dtype=np.float64) / np.sum(weights)
    counts = np.zeros(len(shares), dtype=np.int64)
    datasets, samples = [], []
    for i in range(size):
        best = int(np.argmax(shares * max(i, 1.0) - counts))
        datasets.append(best)
        samples.append(int(counts[best]))
        counts[best] += 1
    return datasets, samples


def test_small_example() -> None:
    datasets, samples = blend_order([0.2, 0.3, 0.5], 12)
    assert list(zip(datasets.tolist(), samples.tolist(), strict=True)) == [
        *[(2, 0), (1, 0), (0, 0), (2, 1), (1, 1), (2, 2)],
        *[(0, 1), (2, 3), (1, 2), (2, 4), (0, 2), (2, 5)],
    ]


def test_random_weights_equal_the_reference() -> None:
    rng = np.random.RandomState(0)
    for trial in range(120):
        number = rng.choice([1, 2, 3, 7, 40])
        # Small integers with ties, very unequal weights, and random weights.
        weights = [rng.randint(1, 4, number), rng.rand(number) ** 6 + 1e-6, rng.rand(number) + 1e-3][
            trial % 3
        ]
        size = rng.randint(1, 1500)
        datasets, samples = blend_order(weights, size)
        assert (datasets.tolist(), samples.tolist()) == reference(weights, size)


def test_no_samples() -> None:
    assert [len(array) for array in blend_order([0.5, 0.5], 0)] == [0, 0]


def test_no_dataset_exceeds_its_share_rounded_up() -> None:
    rng = np.random.RandomState(1)
    for _ in range(300):
        weights = rng.rand(rng.randint(1, 10)) ** rng.randint(1, 5) + 1e-4
        size = rng.randint(1, 400)
        counts = np.bincount(blend_order(weights, size)[0], minlength=len(weights))
        assert (counts <= np.ceil(weights / weights.sum() * size * (1 + 1e-12))).all()


def test_ten_million_samples_take_seconds() -> None:
    start = time.perf_counter()
    datasets, samples = blend_order([0.2, 0.35, 0.45], 10**7)
    assert time.perf_counter() - start < 20
    np.testing.assert_allclose(np.bincount(datasets) / 10**7, [0.2, 0.35, 0.45], atol=1e-6)
    for d in range(3):
        own = samples[datasets == d]
        np.testing.assert_array_equal(own, np.arange(len(own)))


def test_order_is_cached(tmp_path: Path) -> None:
    first = load_or_build_order([0.5, 0.5], 10, split="train", cache=str(tmp_path))
    again = load_or_build_order([0.5, 0.5], 10, split="train", cache=str(tmp_path))
    other = load_or_build_order([0.6, 0.4], 10, split="train", cache=str(tmp_path))
    assert first.paths == again.paths != other.paths
    Path(first.paths[0]).write_bytes(b"damaged")
    datasets, _ = load_or_build_order([0.5, 0.5], 10, split="train", cache=str(tmp_path))
    assert datasets.tolist() == reference(np.array([0.5, 0.5]), 10)[0]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["a"], (["a"], None)),
        (["2", "a"], (["a"], [2.0])),
        (["0.3", "a", "7e-1", "b"], (["a", "b"], [0.3, 0.7])),
        (["a", "b", "c"], (["a", "b", "c"], None)),
        (["a", "b"], (["a", "b"], None)),
    ],
)
def test_parse(values: list[str], expected: tuple) -> None:
    assert parse_blend(values, "--data-path") == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "--data-path is empty; give a prefix"),
        (["1", "a", "2"], "--data-path: 3 values; weights and prefixes come in pairs"),
        (["1", "a", "x", "b"], "expected the weight of b, but 'x' is not a number"),
        (["a", "b", "1", "c"], "expected the weight of b, but 'a' is not a number"),
        (["1", "a", "0", "b"], "the weight of b is 0; it must be positive and finite"),
        (["-1", "a", "1", "b"], "the weight of a is -1; it must be"),
        (["nan", "a", "1", "b"], "the weight of a is nan"),
        (["inf", "a", "1", "b"], "the weight of a is inf"),
    ],
)
def test_invalid_blends(values: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_blend(values, "--data-path")


def test_a_prefix_that_is_given_twice_is_noted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    a, b = (str(tmp_path / name) for name in "ab")
    for prefix in (a, b):
        with IndexedDatasetWriter(prefix, np.uint16) as writer:
            writer.add_document([np.arange(10, dtype=np.uint16)])
    builder: Any = None  # reads nothing yet
    with caplog.at_level(logging.INFO, logger="megatron"):
        assert open_blend(builder, ["1", a, "1", b], "--data-path") is not None
        assert caplog.messages == []
        open_blend(builder, ["1", a, "2", b, "3", a], "--data-path")
    (note,) = caplog.messages
    assert note.startswith(f"note: --data-path names {a} more than once, which repeats its samples")
