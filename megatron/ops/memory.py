"""How a CPU's memory is had from the system."""

from __future__ import annotations

import ctypes

# Of glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4


def keep_freed_memory() -> None:
    """Have malloc keep what is freed, for the next step needs as much again, where it is glibc's.

    By default glibc gives each large block back to the system at once, and every step has the system clear all its
    activations anew, page by page: a tenth of its time.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return
    mallopt(M_MMAP_MAX, 0)
    mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
