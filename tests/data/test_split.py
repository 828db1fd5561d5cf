from __future__ import annotations

import pytest

from megatron.data.config import DataConfig
from megatron.data.split import DATA_ORDERS, parse_split
from megatron.errors import InputError


@pytest.mark.parametrize(
    ("split", "size", "bounds"),
    [
        # Bounds of Megatron-LM v2.5.
        ("969, 30, 1", 1000, [0, 969, 999, 1000]),
        ("949,50,1", 999, [0, 948, 998, 999]),
        ("98,2,0", 7, [0, 7, 7, 7]),
        ("1,1,1", 10, [0, 4, 7, 10]),
        ("900,50,50", 60, [0, 54, 57, 60]),
        ("949/50/1", 999, [0, 948, 998, 999]),
        ("1", 10, [0, 10, 10, 10]),
        ("'99,1,0'", 200, [0, 198, 200, 200]),
        ("3,1", 4, [0, 3, 4, 4]),
        # Both halves round up and train has nothing to give back; Megatron-LM computes a bound of -1.
        ("0,1.5,3.5", 5, [0, 0, 1, 5]),
    ],
)
def test_bounds(split: str, size: int, bounds: list[int]) -> None:
    assert DATA_ORDERS["v2.5"](parse_split(split), size) == bounds


def test_bounds_cover_everything_once() -> None:
    for split in ("969,30,1", "1,1,1", "0,1,1", "2,3,5", "0.3,0.3,0.4"):
        for size in range(200):
            bounds = DATA_ORDERS["v2.5"](parse_split(split), size)
            assert bounds == sorted(bounds)
            assert (bounds[0], bounds[-1]) == (0, size)


@pytest.mark.parametrize("split", ["", "a,b", "1,2,3,4", "-1,2", "0,0,0", "nan,1,1", "inf,1,1", "1;2;3"])
def test_invalid_splits_name_the_flag(split: str) -> None:
    with pytest.raises(InputError, match=r"^--split: ") as caught:
        DataConfig(split=split)
    assert repr(split) in str(caught.value)
