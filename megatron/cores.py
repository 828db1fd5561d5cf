"""CPU cores of this process."""

from __future__ import annotations

import os


def available_cores() -> int:
    """Number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def own_cores() -> int:
    """Number of cores for this process if those of a machine, which torchrun counts, share them; at least 1."""
    return max(1, available_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
