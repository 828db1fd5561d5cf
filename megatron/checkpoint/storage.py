"""The folder of a run's checkpoints, in which a checkpoint appears atomically.

    DIR/latest_checkpointed_iteration.txt    the tracker: the newest iteration
    DIR/iter_0000100/...                     a checkpoint
    DIR/best/...                             fine-tuning: a folder like DIR with the best checkpoint only

A checkpoint is written under a temporary name, its files are synced to disk, the folder is renamed, and the tracker is
replaced last. A crash at any point leaves the earlier checkpoints and the tracker intact.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
import logging
import os
import platform
import re
import shutil
from multiprocessing.pool import AsyncResult, ThreadPool
from pathlib import Path
from typing import TextIO

from megatron.errors import InputError
from megatron.files import read_file

TRACKER = "latest_checkpointed_iteration.txt"
TRACKER_BYTES = 1000
# A file with several digests has one for each segment of so many bytes: part of the format.
SEGMENT_BYTES = 1 << 26
HASH_THREADS = 4


def folder_of(root: Path, iteration: int) -> Path:
    """The folder of an iteration's checkpoint."""
    return root / f"iter_{iteration:07d}"


def newest_iteration(root: Path, *, exists: bool = True) -> int | None:
    """The iteration in the tracker of `root`; None without a tracker, or if it is empty.

    Raises:
        InputError: the tracker holds no iteration; or, with `exists`, its checkpoint does not exist.
    """
    tracker = root / TRACKER
    check_is_file(tracker)
    try:
        text = read_file(tracker, TRACKER_BYTES).decode(errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise InputError(f"{tracker}: cannot be read ({error.strerror})") from None
    if not text:  # a full disk or a lost machine leaves an empty file
        return None
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise InputError(f"{tracker}: {text[:40]!r} is not an iteration")
    if exists and not folder_of(root, int(text)).is_dir():
        raise InputError(
            f"{tracker}: names iteration {int(text)}, but there is no such folder; --ckpt-step takes {iterations(root)}"
        )
    return int(text)


def check_is_file(path: Path) -> None:
    """Raise `InputError` if `path` is anything but a file: a link may lead out of the folder, a pipe may never end."""
    if path.is_symlink():
        raise InputError(f"{path}: is a symbolic link; a checkpoint holds only files")
    if path.exists() and not path.is_file():
        raise InputError(f"{path}: is not a file")


def begin_checkpoint(root: Path, iteration: int, needed: int) -> None:
    """Make the temporary folder for a checkpoint of `needed` bytes.

    Raises:
        OSError: it cannot be made, or the disk has too little free space.
    """
    for remnant in (*root.glob(".writing-iter_*"), *root.glob(".deleting-iter_*")):  # of a killed run
        shutil.rmtree(remnant)
    check_room(root, needed)
    temporary_folder(root, iteration).mkdir(parents=True)


def check_room(folder: Path, needed: int) -> None:
    """Raise `OSError` if a folder's disk has fewer free bytes than `needed`."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(f"it needs {needed / 1e9:.3g} GB, and {free / 1e9:.3g} GB are free")


def temporary_folder(root: Path, iteration: int) -> Path:
    """The folder to which an iteration's checkpoint is written before it is renamed."""
    return root / f".writing-{folder_of(root, iteration).name}"


def finish_checkpoint(root: Path, iteration: int) -> None:
    """Turn the temporary folder into the newest checkpoint."""
    folder, temporary = folder_of(root, iteration), temporary_folder(root, iteration)
    sync_all(temporary)
    replaced = folder.with_name(f".deleting-{folder.name}")
    if folder.exists():
        folder.rename(replaced)
    temporary.rename(folder)
    sync(root)
    replace_text(root / TRACKER, str(iteration))
    shutil.rmtree(replaced, ignore_errors=True)


def replace_text(path: Path, text: str) -> None:
    """Replace the content of a file atomically."""
    temporary = path.with_name(f".writing-{path.name}")
    temporary.write_text(text, encoding="utf-8")
    sync(temporary)
    temporary.rename(path)
    sync(path.parent)


def write_file(path: Path, parts: list[memoryview]) -> AsyncResult[list[str]]:
    """Write a file from its parts and sync it. Daemon threads compute its digests meanwhile, and may take longer."""
    begins = [0, *itertools.accumulate(part.nbytes for part in parts)]

    def digest(start: int) -> str:
        sha256 = hashlib.sha256()
        for begin, part in zip(begins, parts, strict=False):
            sha256.update(part[max(start - begin, 0) : max(start + SEGMENT_BYTES - begin, 0)])
        return sha256.hexdigest()

    pool = ThreadPool(HASH_THREADS)
    digests = pool.map_async(digest, range(0, begins[-1], SEGMENT_BYTES), chunksize=1)
    pool.close()
    with path.open("wb") as file:
        file.writelines(parts)
        file.flush()
        os.fsync(file.fileno())
    return digests


def read_digests(path: Path, *, whole: bool) -> list[str]:
    """Compute the SHA-256 of a `whole` file, or of each segment. Raises `OSError` if it cannot be read."""
    size = max(path.stat().st_size, 1)
    length = size if whole else SEGMENT_BYTES

    def digest(start: int) -> str:
        sha256, left = hashlib.sha256(), length
        with path.open("rb") as file:
            file.seek(start)
            while data := file.read(min(left, 1 << 20)):
                sha256.update(data)
                left -= len(data)
        return sha256.hexdigest()

    with ThreadPool(HASH_THREADS) as pool:
        return pool.map(digest, range(0, size, length), chunksize=1)


def sync(path: Path) -> None:
    """Flush a file, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_all(folder: Path) -> None:
    """Flush a folder and everything in it to disk."""
    for path in (*sorted(folder.rglob("*"), reverse=True), folder):
        sync(path)


def iterations(root: Path) -> list[int]:
    """The iterations of the checkpoints in `root`, in ascending order."""
    matches = (re.fullmatch(r"iter_([0-9]{7,})", path.name) for path in root.glob("iter_*"))
    return sorted(int(match[1]) for match in matches if match)


def lock(root: Path) -> TextIO:
    """Lock a folder for this run until the returned file is closed; on a file system without locks, log a note.

    Raises:
        InputError: another run holds the lock, or the lock's file cannot be written.
    """
    try:
        file = (root / ".lock").open("a+")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.truncate(0)
        print(f"process {os.getpid()} on {platform.node()}", file=file, flush=True)
    except BlockingIOError:
        file.seek(0)
        owner = f"another run ({file.read(100).strip()})"
        raise InputError(f"--save: {root} is being written to by {owner}; choose another") from None
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
            raise InputError(f"--save: {root / '.lock'} cannot be written ({error.strerror})") from None
        logging.getLogger("megatron").info(f"{root} has no locks ({error.strerror}); save one run there only")
    return file
