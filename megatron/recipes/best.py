"""Keep the best checkpoint of a run."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from megatron.checkpoint.storage import (
    begin_checkpoint,
    finish_checkpoint,
    folder_of,
    iterations,
    temporary_folder,
)
from megatron.recipes.retention import discard


def keep_best(root: Path, iteration: int) -> Path:
    """Make an iteration's checkpoint the only one in the folder `best`; returns that folder.

    Its files are hard links, which take no space while the checkpoint itself exists.

    Raises:
        OSError: the links cannot be made; the previous best checkpoint is intact.
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
    except OSError:  # some file systems have no hard links
        shutil.copyfile(path, copy)
