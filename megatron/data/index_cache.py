"""Index arrays that are built once, kept on disk, and memory-mapped by every process that needs them.

An array's file name carries a fingerprint of all it depends on, so a changed data set, split or seed can never
meet a stale file. Processes of one node that start together wait for the first of them to build; processes
that share no lock build the same bytes and replace each other's files atomically, which is harmless.
"""

from __future__ import annotations

import contextlib
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

from megatron.flags import InputError

logger = logging.getLogger("megatron")

FORMAT = 1  # part of every fingerprint; to be raised when the arrays of the same inputs change
EDGE = 1 << 20
PATIENCE = 5.0  # seconds of waiting before a line says what for


class MappedArrays:
    """Arrays of .npy files, memory-mapped; pickles as their paths.

    Iterates over the arrays, in the order of the paths.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = tuple(paths)
        # Plain views: indexing an np.memmap itself costs several times as much.
        self._arrays = [np.asarray(np.load(p, mmap_mode="r", allow_pickle=False)) for p in self.paths]

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter(self._arrays)

    def __reduce__(self) -> tuple[type[MappedArrays], tuple[tuple[str, ...]]]:
        return MappedArrays, (self.paths,)


def file_fingerprint(path: str) -> dict[str, Any]:
    """What tells this file from a later one of the same name, without reading all of it."""
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
    """The arrays that `build` returns, from files of an earlier call where there are any.

    Args:
        folder: where the files are; made if absent.
        label: beginning of the file names, for people.
        key: everything the arrays depend on, as JSON values; its hash is part of the file names.
        names: what the arrays are called in their file names.
        build: makes the arrays.
        check: whether arrays found on disk can be what `build` makes; if not, they are built again.

    Raises:
        InputError: `folder` cannot be written.
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
            "name a folder with --data-cache-path that every process can write to"
        ) from None
    return found


def check_memory(what: str, needed: int) -> None:
    """Refuse to build arrays that this machine cannot hold, as when a flag has some zeros too many.

    Args:
        what: which samples of which data, for the message.
        needed: bytes, roughly.
    """
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > available:
        raise InputError(
            f"{what} need an index of {needed / 1e9:,.1f} GB, and this machine has {available / 1e9:,.1f} GB; "
            "lower --train-iters or --train-samples"
        )


def spread(values: np.ndarray, count: int = 1 << 20) -> np.ndarray:
    """All of `values` where they are few, else about `count` of them at even distances; for a quick check."""
    return values[:: max(1, len(values) // count)]


def _load(paths: Sequence[str], check: Callable[[Sequence[np.ndarray]], bool]) -> MappedArrays | None:
    """The arrays if all files are there and sound. Says so if there are files that are not."""
    if not all(map(os.path.exists, paths)):
        return None
    try:
        arrays = MappedArrays(paths)
    except Exception:
        arrays = None  # numpy parses the header with Python's tokenizer; damage to it can raise anything
    if arrays is not None and check(list(arrays)):
        return arrays
    logger.warning("%s is damaged; building it and its siblings again", paths[0])
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
    """Hold an advisory lock on the file, which the system lets go when this process ends in any way."""
    with open(path, "w") as file:
        start, told = time.monotonic(), False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not told and time.monotonic() - start > PATIENCE:
                    logger.info("waiting for another process that builds what %s guards", path)
                    told = True
                time.sleep(0.1)
            except OSError as error:
                # Some network file systems know no locks; without one the work may be done twice.
                logger.info("%s cannot be locked (%s); going on without", path, error.strerror)
                break
        yield
