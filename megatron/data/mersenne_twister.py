"""64-bit Mersenne Twister (C++'s std::mt19937_64), which numpy lacks.

Nishimura, "Tables of 64-bit Mersenne Twisters", 2000.
"""

from __future__ import annotations

import numpy as np

WORDS = 312  # of state
MIDDLE = 156
UPPER = np.uint64(0xFFFFFFFF80000000)  # the upper 33 bits
LOWER = np.uint64(0x7FFFFFFF)
MATRIX = np.uint64(0xB5026F5AA96619E9)
# The state is updated in three vectorized blocks, in an order that respects the recurrence. Each entry has the words
# to update, their successors, and the words MIDDLE ahead.
BLOCKS = (
    (slice(0, MIDDLE), slice(1, MIDDLE + 1), slice(MIDDLE, WORDS)),
    (slice(MIDDLE, WORDS - 1), slice(MIDDLE + 1, WORDS), slice(0, MIDDLE - 1)),
    (slice(WORDS - 1, WORDS), slice(0, 1), slice(MIDDLE - 1, MIDDLE)),
)


class MersenneTwister64:
    """Stream of random 64-bit words, the same as std::mt19937_64(seed)."""

    def __init__(self, seed: int) -> None:
        words = [seed]
        for i in range(1, WORDS):
            words.append((6364136223846793005 * (words[-1] ^ (words[-1] >> 62)) + i) % 2**64)
        self._state = np.array(words, dtype=np.uint64)
        self._unused = np.empty(0, dtype=np.uint64)  # generated, but not yet returned

    def draw(self, count: int) -> np.ndarray:
        """Return the next `count` words, uint64 [count]."""
        blocks = [self._unused]
        for _ in range(-(-max(0, count - len(self._unused)) // WORDS)):
            self._twist()
            blocks.append(_temper(self._state))
        words = np.concatenate(blocks)
        self._unused = words[count:].copy()
        return words[:count]

    def _twist(self) -> None:
        state = self._state
        for words, successors, ahead in BLOCKS:
            joined = (state[words] & UPPER) | (state[successors] & LOWER)
            state[words] = state[ahead] ^ (joined >> 1) ^ (joined & 1) * MATRIX


def _temper(words: np.ndarray) -> np.ndarray:
    words = words ^ (words >> 29) & 0x5555555555555555
    words ^= words << 17 & 0x71D67FFFEDA60000
    words ^= words << 37 & 0xFFF7EEE000000000
    return words ^ words >> 43
