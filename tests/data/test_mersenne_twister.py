from __future__ import annotations

import numpy as np
import pytest

from megatron.data.mersenne_twister import MersenneTwister64

# The C++ standard specifies the 10,000th number for the default seed (N4950, 28.5.6).
DEFAULT_SEED, FIRST, TEN_THOUSANDTH = 5489, 14514284786278117030, 9981545732273789042


@pytest.mark.parametrize("pieces", [[10_000], [1, 0, 311, 312, 313, 9063], [1] * 400 + [9600]])
def test_stream_equals_the_cpp_standard(pieces: list[int]) -> None:
    twister = MersenneTwister64(DEFAULT_SEED)
    words = [twister.draw(count) for count in pieces]
    assert [len(w) for w in words] == pieces
    words = np.concatenate(words)
    assert words.dtype == np.uint64
    assert (int(words[0]), int(words[-1])) == (FIRST, TEN_THOUSANDTH)
