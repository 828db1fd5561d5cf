"""Sample indices: built once, cached on disk, and memory-mapped by every process.

The file name of an array contains a hash of everything the array depends on, so a changed dataset, split or seed
never meets a stale file. Processes on one node that start together wait for the first one to build. Processes
that share no lock build the same bytes and replace each other's files atomically, which is harmless.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron.data.indexed import IndexedDataset
from megatron.errors import InputError

logger = logging.getLogger("megatron")

FORMAT = 1  # part of every hash; increase it when the same inputs produce other arrays
EDGE = 1 << 20  # bytes hashed at either end of a file
LOG_WAIT_AFTER = 5.0  # seconds


class MappedArrays:
    """Memory-mapped .npy files; iterates over the arrays in the order of the paths.

    Pickles as its paths, so a worker process maps the files itself.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = tuple(paths)
        # Plain views: indexing an np.memmap is several times slower.
        self._arrays = [np.asarray(np.load(p, mmap_mode="r", allow_pickle=False)) for p in self.paths]

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
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        digest.update(file.read(EDGE))
        file.seek(max(0, status.st_size - EDGE))
        digest.update(file.read(EDGE))
    return {"bytes": status.st_size, "mtime_ns": status.st_mtime_ns, "edges": digest.hexdigest()}


def cached_arrays(
    folder: str,
    label: str,
    key: dict[str, Any],
    names: Sequence[str],
    build: Callable[[], Sequence[np.ndarray]],
    check: Callable[[Sequence[np.ndarray]], bool],
) -> MappedArrays:
    """Load the arrays from the cache, or build and cache them.

    Args:
        folder: cache directory; created if missing.
        label: readable prefix of the file names.
        key: everything the arrays depend on, as JSON values. Its hash is part of the file names.
        names: name of each array, part of its file name.
        build: builds the arrays.
        check: tells whether cached arrays are plausible; if not, they are built again.

    Raises:
        InputError: `folder` is not writable.
    """
    hashed = hashlib.sha256(json.dumps({"format": FORMAT, **key}, sort_keys=True).encode()).hexdigest()[:20]
    stem = os.path.join(folder, f"{label}-{hashed}")
    paths = [f"{stem}-{name}.npy" for name in names]
    found = _load(paths, check)
    if found is not None:
        return found
    try:
        os.makedirs(folder, exist_ok=True)
        with _lock(f"{stem}.lock"):
            found = _load(paths, check)  # another process may have built them in the meantime
            if found is None:
                for path, values in zip(paths, build(), strict=True):
                    _save(path, values)
                found = MappedArrays(paths)
    except OSError as error:
        raise InputError(
            f"sample indices cannot be written to {folder}: {error.strerror}; "
            "set --data-cache-path to a directory that every process can write to"
        ) from None
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


def subsample(values: np.ndarray, count: int = 1 << 20) -> np.ndarray:
    """Return about `count` evenly spaced rows of `values`, or all of them if there are fewer; for a quick check."""
    return values[:: max(1, len(values) // count)]


def _load(paths: Sequence[str], check: Callable[[Sequence[np.ndarray]], bool]) -> MappedArrays | None:
    """Map the arrays if all files exist and are plausible. Damaged files are logged."""
    if not all(map(os.path.exists, paths)):
        return None
    try:
        arrays = MappedArrays(paths)
    except Exception:
        arrays = None  # numpy parses the header with Python's tokenizer; a damaged one can raise anything
    if arrays is not None and check(list(arrays)):
        return arrays
    logger.warning("%s is damaged; rebuilding the index", paths[0])
    return None


def _save(path: str, values: np.ndarray) -> None:
    temporary = f"{path}.{uuid.uuid4().hex}.tmp"
    try:
        with open(temporary, "wb") as file:
            np.save(file, values, allow_pickle=False)
            file.flush()
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
