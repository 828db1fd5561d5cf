"""The 64-bit Mersenne Twister, std::mt19937_64 of C++, which numpy does not have.

Nishimura, "Tables of 64-bit Mersenne Twisters", 2000.
"""

from __future__ import annotations

import numpy as np

WORDS = 312  # of state
MIDDLE = 156
UPPER = np.uint64(0xFFFFFFFF80000000)  # the bits above the lowest 31
LOWER = np.uint64(0x7FFFFFFF)
MATRIX = np.uint64(0xB5026F5AA96619E9)
# Words that are made from others as they were or are already made anew: (these, the ones after them, the others).
PARTS = (
    (slice(0, MIDDLE), slice(1, MIDDLE + 1), slice(MIDDLE, WORDS)),
    (slice(MIDDLE, WORDS - 1), slice(MIDDLE + 1, WORDS), slice(0, MIDDLE - 1)),
    (slice(WORDS - 1, WORDS), slice(0, 1), slice(MIDDLE - 1, MIDDLE)),
)


class MersenneTwister64:
    """A stream of random 64-bit words, the same as that of std::mt19937_64(seed)."""

    def __init__(self, seed: int) -> None:
        words = [seed]
        for i in range(1, WORDS):
            words.append((6364136223846793005 * (words[-1] ^ (words[-1] >> 62)) + i) % 2**64)
        self._state = np.array(words, dtype=np.uint64)
        self._ahead = np.empty(0, dtype=np.uint64)  # drawn from the state, and not yet given away

    def draw(self, count: int) -> np.ndarray:
        """The next `count` words, uint64 [count]."""
        blocks = [self._ahead]
        for _ in range(-(-max(0, count - len(self._ahead)) // WORDS)):
            self._twist()
            blocks.append(_tempered(self._state))
        words = np.concatenate(blocks)
        self._ahead = words[count:].copy()
        return words[:count]

    def _twist(self) -> None:
        state = self._state
        for these, after, others in PARTS:
            joined = (state[these] & UPPER) | (state[after] & LOWER)
            state[these] = state[others] ^ (joined >> 1) ^ (joined & 1) * MATRIX


def _tempered(words: np.ndarray) -> np.ndarray:
    words = words ^ (words >> 29) & 0x5555555555555555
    words ^= words << 17 & 0x71D67FFFEDA60000
    words ^= words << 37 & 0xFFF7EEE000000000
    return words ^ words >> 43
