"""Read whole files that have a largest size."""

from __future__ import annotations

import errno
import os
from pathlib import Path

MAX_BYTES = 1 << 28


def read_file(path: str | Path, most: int = MAX_BYTES) -> bytes:
    """Read a file of at most `most` bytes. A sparse file or a device may have more bytes than the memory.

    Raises:
        OSError: it cannot be read, or is larger.
    """
    with open(path, "rb") as file:
        # The size first, since reading takes memory for the bytes asked for.
        if os.fstat(file.fileno()).st_size <= most and len(content := file.read(most + 1)) <= most:
            return content
    raise OSError(errno.EFBIG, f"larger than {most} bytes", str(path))
