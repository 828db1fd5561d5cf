"""Tune glibc malloc to keep freed memory."""

from __future__ import annotations

import ctypes

# From glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4


def keep_freed_memory() -> None:
    """Make glibc's malloc keep freed memory for the next step; do nothing with another C library.

    By default glibc returns each large block to the system at once, and in every step the system clears the memory of
    all activations again, page by page: a tenth of the step's time.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(M_MMAP_MAX, 0)
    mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
