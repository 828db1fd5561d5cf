"""Tune glibc malloc to keep freed memory."""

from __future__ import annotations

import contextlib
import ctypes

# From glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4


def keep_freed_memory() -> None:
    """Make glibc's malloc keep freed memory for the next step; do nothing with another C library.

    By default glibc returns each large block to the system at once, and in every step the system clears the memory of
    all activations again, page by page: a tenth of the step's time.
    """
    _set_options(mmap_max=0, trim_threshold=2**31 - 1)


def return_freed_memory() -> None:
    """Undo `keep_freed_memory`, with glibc's defaults, and return the memory that is free."""
    _set_options(mmap_max=2**16, trim_threshold=2**17)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _set_options(*, mmap_max: int, trim_threshold: int) -> None:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(M_MMAP_MAX, mmap_max)
    mallopt(M_TRIM_THRESHOLD, trim_threshold)
