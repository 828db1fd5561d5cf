"""Progress of reading the input: a bar on a terminal, otherwise lines."""

from __future__ import annotations

import sys
import time

from tqdm import tqdm


class Progress:
    """Context manager that reports progress to stderr.

    Args:
        total_bytes: size of the input on disk, to estimate the remaining time; None if it is not known, as of a pipe.
        log_interval: documents between two lines, if stderr is not a terminal.
        begin: bytes of the input that an interrupted run has used.
    """

    def __init__(self, total_bytes: int | None, log_interval: int, begin: int = 0) -> None:
        self.documents = 0
        self.text_bytes = 0
        self._total_bytes = total_bytes
        self._begin = begin
        self._log_interval = log_interval
        self._next_line = log_interval
        self._start = time.monotonic()
        on_terminal = sys.stderr.isatty()
        self._bar = None
        if on_terminal:
            initial = 0 if total_bytes is None else begin
            self._bar = tqdm(total=total_bytes, initial=initial, unit="B", unit_scale=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def update(self, documents: int, text_bytes: int, read_bytes: int) -> None:
        """Add documents and bytes of text; `read_bytes` is the total number of input bytes used so far."""
        self.documents += documents
        self.text_bytes += text_bytes
        done = self.text_bytes if self._total_bytes is None else read_bytes
        if self._bar is not None:
            self._bar.set_postfix_str(f"{self.documents:,} documents, {self.speed:.1f} MB/s", refresh=False)
            self._bar.update(done - self._bar.n)
        elif self.documents >= self._next_line:
            self._next_line = self.documents - self.documents % self._log_interval + self._log_interval
            parts = [f"{self.documents:,} documents", f"{self.speed:.1f} MB/s"]
            if self._total_bytes is not None:
                total = max(self._total_bytes, 1)  # 0 if the input has no tokens
                left = self.seconds * (total - read_bytes) / max(read_bytes - self._begin, 1)
                parts += [f"{100 * read_bytes / total:.0f}%", f"{tqdm.format_interval(left)} left"]
            print(", ".join(parts), file=sys.stderr, flush=True)

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    @property
    def speed(self) -> float:
        """Average throughput in MB of text per second."""
        return self.text_bytes / 1e6 / max(self.seconds, 1e-9)
