"""Sample indices: built once, cached on disk, and memory-mapped by every process.

The file name of an array contains a hash of everything the array depends on, so a changed dataset, split or seed
never meets a stale file. Each file ends in a checksum, which every process checks at its start, about 0.3 s for
each GB; a damaged file is rebuilt. Processes on one node that start together wait for the first one to build.
Processes that share no lock build the same bytes and replace each other's files atomically, which is harmless.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import logging
import math
import os
import re
import time
import uuid
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron.data.indexed import IndexedDataset
from megatron.data.mapped import map_file
from megatron.errors import InputError

logger = logging.getLogger("megatron")

FORMAT = 3  # part of every hash; increase it when the same inputs produce other files
CRC_OF_WHOLE = 0x2144DF1C  # CRC-32 of a cached file, which ends with the CRC-32 of its name and content
# The header that np.save writes, 128 bytes with these, with the size of an element and the shape.
HEADER = re.compile(
    rb"\x93NUMPY\x01\0v\0\{'descr': '[<|][iu](\d)', 'fortran_order': False, 'shape': \(([\d, ]+)\), \} *\n"
)
EDGE = 1 << 20  # bytes hashed at either end of a file
LOG_WAIT_AFTER = 5.0  # seconds


class MappedArrays:
    """Memory-mapped .npy files; iterates over the arrays in the order of the paths.

    Pickles as its paths, so a worker process maps the files itself.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = tuple(paths)
        self._arrays = [_array(path) for path in self.paths]

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter(self._arrays)

    def __reduce__(self) -> tuple[type[MappedArrays], tuple[tuple[str, ...]]]:
        return MappedArrays, (self.paths,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexRequest:
    """The samples an index must provide.

    Attributes:
        dataset: token file that the samples come from.
        documents: range of documents of `dataset` to use.
        split: "train", "valid" or "test".
        samples: minimum number of samples.
        seed: random seed of the order.
        cache: cache directory.
    """

    dataset: IndexedDataset
    documents: range
    split: str
    samples: int
    seed: int
    cache: str

    def cache_entry(self, kind: str, length: str, rules: dict[str, Any]) -> tuple[str, str, dict[str, Any]]:
        """Return the first three arguments of `cached_arrays` for an index of this request.

        Args:
            kind: "gpt" or "bert".
            length: the sequence length, for the file names.
            rules: what the index depends on besides this request, as JSON values.
        """
        name = os.path.basename(self.dataset.prefix)[:100]
        key = {
            "kind": kind,
            "data": file_fingerprint(self.dataset.idx_path),
            "documents": [self.documents.start, self.documents.stop],
            "samples": self.samples,
            "seed": self.seed,
        }
        return self.cache, f"{name}-{self.split}-{self.samples}ns-{length}-{self.seed}s", key | rules


def file_fingerprint(path: str) -> dict[str, Any]:
    """Identify the contents of a file by its size, mtime and edges, without reading all of it."""
    status, data = os.stat(path), map_file(path)
    digest = hashlib.sha256(data[:EDGE].tobytes() + data[-EDGE:].tobytes())
    return {"bytes": status.st_size, "mtime_ns": status.st_mtime_ns, "edges": digest.hexdigest()}


def cached_arrays(
    folder: str,
    label: str,
    key: dict[str, Any],
    names: Sequence[str],
    build: Callable[[], Sequence[np.ndarray]],
) -> MappedArrays:
    """Load the arrays from the cache, or build and cache them.

    Args:
        folder: cache directory; created if missing.
        label: readable prefix of the file names.
        key: everything the arrays depend on, as JSON values. Its hash is part of the file names.
        names: name of each array, part of its file name.
        build: builds the arrays. If cached files are damaged, the arrays are built again.

    Raises:
        InputError: `folder` is not writable.
    """
    hashed = hashlib.sha256(json.dumps({"format": FORMAT, **key}, sort_keys=True).encode()).hexdigest()[:20]
    stem = os.path.join(folder, f"{label}-{hashed}")
    paths = [f"{stem}-{name}.npy" for name in names]
    try:
        if (found := _load(paths)) is None:
            os.makedirs(folder, exist_ok=True)
            with _lock(f"{stem}.lock"):
                if (found := _load(paths)) is None:  # else another process has built them in the meantime
                    for path, values in zip(paths, build(), strict=True):
                        _save(path, values)
                    found = MappedArrays(paths)
    except OSError as error:
        hint = "set --data-cache-path to a directory that every process can write to"
        if error.errno == errno.EMFILE:
            hint = "raise the limit of open files (ulimit -n)"
        raise InputError(f"sample indices cannot be written to {folder}: {error.strerror}; {hint}") from None
    return found


def check_memory(what: str, needed: int) -> None:
    """Refuse to build arrays larger than the machine's memory, as a flag with too many zeros would ask for.

    Args:
        what: subject of the message.
        needed: approximate size in bytes.
    """
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > available:
        raise InputError(
            f"{what} need an index of {needed / 1e9:,.1f} GB, but this machine has {available / 1e9:,.1f} GB; "
            "lower --train-iters or --train-samples"
        )


def _load(paths: Sequence[str]) -> MappedArrays | None:
    """Map the arrays if all files exist and none is damaged. Damaged files are logged."""
    if not all(map(os.path.exists, paths)):
        return None
    for path in paths:
        if not _is_whole(path):
            logger.warning("%s is damaged; rebuilding the index", path)
            return None
    return MappedArrays(paths)


def _is_whole(path: str) -> bool:
    """Compare a file's size with its header, and its checksum, which would take minutes for a hole of a terabyte."""
    with open(path, "rb") as file:
        header = HEADER.fullmatch(file.read(128))
    size = header and 132 + int(header[1]) * math.prod(map(int, re.findall(rb"\d+", header[2])))
    if size != os.path.getsize(path):
        return False
    return zlib.crc32(map_file(path).data, zlib.crc32(Path(path).name.encode())) == CRC_OF_WHOLE


def _array(path: str) -> np.ndarray:
    """Map the array of a cached file. np.load reads the header; its map, which keeps a descriptor, is dropped."""
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    return map_file(path)[array.offset :][: array.nbytes].view(array.dtype).reshape(array.shape)


def _save(path: str, values: np.ndarray) -> None:
    temporary = f"{path}.{uuid.uuid4().hex}.tmp"
    try:
        with open(temporary, "wb", buffering=0) as file:
            np.save(file, np.ascontiguousarray(values), allow_pickle=False)
            crc = zlib.crc32(map_file(temporary).data, zlib.crc32(Path(path).name.encode()))
            file.write(crc.to_bytes(4, "little"))
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)


@contextlib.contextmanager
def _lock(path: str) -> Iterator[None]:
    """Hold an advisory lock on the file. The system releases it when this process ends, however it ends."""
    with open(path, "w") as file:
        start, logged = time.monotonic(), False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not logged and time.monotonic() - start > LOG_WAIT_AFTER:
                    logger.info("waiting for the process that holds %s and builds the index", path)
                    logged = True
                time.sleep(0.1)
            except OSError as error:
                # Some network file systems do not support locks. Without one the work may be done twice.
                logger.info("%s cannot be locked (%s); continuing without a lock", path, error.strerror)
                break
        yield
