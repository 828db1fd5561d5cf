"""The time that training takes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Time and iterations of training since they were last taken."""

    def __init__(self) -> None:
        self.begin = time.perf_counter()
        self.iterations = 0

    def take(self) -> tuple[float, int]:
        """Seconds and iterations since the last call."""
        now = time.perf_counter()
        taken = now - self.begin, self.iterations
        self.begin, self.iterations = now, 0
        return taken

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time of the block: evaluations and checkpoints are not training."""
        before = time.perf_counter()
        yield
        self.begin += time.perf_counter() - before
