"""Folders of checkpoints: where they lie, and how one comes to be there whole or not at all.

    DIR/latest_checkpointed_iteration.txt    the tracker: the number of the newest iteration
    DIR/iter_0000100/...                     one folder a checkpoint
    DIR/taken_back_to_iteration.txt          of --ckpt-step, once it has been followed
    DIR/best/...                             of fine-tuning: a folder like DIR, with the best checkpoint alone

A checkpoint is written under a temporary name, every file is synced to disk, the folder is renamed, and the
tracker is replaced last. Whatever stops this in between leaves the earlier checkpoints and the tracker whole.
"""

from __future__ import annotations

import fcntl
import os
import platform
import re
import shutil
from pathlib import Path
from typing import TextIO

from megatron.flags import InputError

TRACKER = "latest_checkpointed_iteration.txt"
TAKEN_BACK = "taken_back_to_iteration.txt"


def folder_of(root: Path, iteration: int) -> Path:
    """Folder of the checkpoint of an iteration."""
    return root / f"iter_{iteration:07d}"


def newest_iteration(root: Path) -> int | None:
    """The iteration that the tracker of `root` names; None if there is no tracker.

    Raises:
        InputError: the tracker is not a number, or names a checkpoint that is not there.
    """
    tracker = root / TRACKER
    check_is_file(tracker)
    try:
        text = tracker.read_text(encoding="utf-8", errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise InputError(f"{tracker}: cannot be read ({error.strerror})") from None
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise InputError(f"{tracker}: {text[:40]!r} is not the number of an iteration")
    if not folder_of(root, int(text)).is_dir():
        raise InputError(
            f"{tracker}: names iteration {int(text)}, but there is no {folder_of(root, int(text))}"
        )
    return int(text)


def check_is_file(path: Path) -> None:
    """Raise `InputError` if there is something else than a file at `path`: a link may lead out of the folder, and a
    pipe or a device has no end."""
    if path.is_symlink():
        raise InputError(f"{path}: is a symbolic link; a checkpoint consists of files")
    if path.exists() and not path.is_file():
        raise InputError(f"{path}: is not a file")


def begin_checkpoint(root: Path, iteration: int, needed: int) -> None:
    """Make the temporary folder that a checkpoint of `needed` bytes is written into.

    Raises:
        OSError: it cannot be made, or there is too little room.
    """
    for left in (*root.glob(".writing-iter_*"), *root.glob(".deleting-iter_*")):  # by a run that was killed
        shutil.rmtree(left)
    check_room(root, needed)
    temporary_folder(root, iteration).mkdir(parents=True)


def check_room(folder: Path, needed: int) -> None:
    """Raise `OSError` if the disk of a folder has less room than so many bytes."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(f"it needs {needed / 1e9:.3g} GB, and {free / 1e9:.3g} GB are free")


def temporary_folder(root: Path, iteration: int) -> Path:
    """Where the checkpoint of an iteration is written."""
    return root / f".writing-{folder_of(root, iteration).name}"


def finish_checkpoint(root: Path, iteration: int) -> None:
    """Make the temporary folder, whose files are written and synced, the newest checkpoint."""
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
    """Give `path` this content in one step that a crash cannot split."""
    temporary = path.with_name(f".writing-{path.name}")
    temporary.write_text(text, encoding="utf-8")
    sync(temporary)
    temporary.rename(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_all(folder: Path) -> None:
    """Wait until all that is in a folder is on the disk."""
    for path in sorted(folder.rglob("*"), reverse=True):
        sync(path)
    sync(folder)


def discard(folder: Path) -> None:
    """Delete a checkpoint; under another name, so that half of one is never mistaken for a whole."""
    doomed = folder.with_name(f".deleting-{folder.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed)


def iterations(root: Path) -> list[int]:
    """The iterations of which `root` has checkpoints, rising."""
    matches = (re.fullmatch(r"iter_([0-9]{7,})", path.name) for path in root.glob("iter_*"))
    return sorted(int(match[1]) for match in matches if match)


def discard_older(root: Path, iteration: int, *, keep_last: int | None, retain_interval: int | None) -> None:
    """Delete checkpoints older than that of `iteration`, until `keep_last` are left of these and it.

    Those of iterations that are multiples of `retain_interval` stay, and do not count; with this and no `keep_last`
    all others go. Later ones stay too: they are of a run that was taken back to an earlier checkpoint.
    """
    if keep_last is None and retain_interval is None:
        return
    older = [i for i in iterations(root) if i < iteration]
    passing = [i for i in older if retain_interval is None or i % retain_interval]
    for i in passing[: max(0, len(passing) + 1 - (keep_last or 1))]:
        discard(folder_of(root, i))


def keep_best(root: Path, iteration: int) -> Path:
    """Make the checkpoint of an iteration the one in the folder `best`, which is given, and delete the one before.

    Its files are links to the same contents, and take no room of their own as long as the checkpoint itself is kept.

    Raises:
        OSError: it cannot be done; the one before is whole still.
    """
    best = root / "best"
    best.mkdir(exist_ok=True)
    begin_checkpoint(best, iteration, 0)
    source, copy = folder_of(root, iteration), temporary_folder(best, iteration)
    try:
        shutil.copytree(source, copy, copy_function=_link, dirs_exist_ok=True)
        finish_checkpoint(best, iteration)
    except BaseException:
        shutil.rmtree(copy, ignore_errors=True)
        raise
    for other in iterations(best):
        if other != iteration:
            discard(folder_of(best, other))
    return best


def _link(path: str, copy: str) -> None:
    try:
        os.link(path, copy)
    except OSError:  # some file systems have no links
        shutil.copyfile(path, copy)


def taken_back(root: Path) -> int | None:
    """The iteration that the run in `root` was last taken back to, if it ever was."""
    try:
        return int((root / TAKEN_BACK).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def take_back(root: Path, iteration: int) -> list[Path]:
    """Make the checkpoint of an iteration the newest of `root`; gives the names under which later ones are kept."""
    replace_text(root / TRACKER, str(iteration))
    kept = []
    for later in [i for i in iterations(root) if i > iteration]:
        folder, number = folder_of(root, later), 1
        while (name := root / f"abandoned-{folder.name}-{number}").exists():
            number += 1
        folder.rename(name)
        kept.append(name)
    replace_text(root / TAKEN_BACK, str(iteration))
    return kept


def lock(root: Path) -> TextIO:
    """Claim a folder for the run of this process, for as long as the file that is given stays open.

    Raises:
        InputError: another run has it.
    """
    file = (root / ".lock").open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        owner = file.read(100).strip()
        raise InputError(
            f"--save: {root} is being written to by another run ({owner}); choose another"
        ) from None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {platform.node()}\n")
    file.flush()
    return file
