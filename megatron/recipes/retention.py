"""Deletion of old checkpoints."""

from __future__ import annotations

import functools
import logging
import shutil
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from megatron.checkpoint.storage import folder_of, iterations
from megatron.recipes.config import RetentionConfig
from megatron.training.loop import Hook, Trainer

logger = logging.getLogger("megatron")


class Retention(Hook):
    """Delete old checkpoints after each new one (--keep-last, --save-retain-interval)."""

    def during_run(self, trainer: Trainer) -> AbstractContextManager[object]:
        trainer.saver.after_write.append(
            functools.partial(discard_older, config=trainer.config.plugin(RetentionConfig))
        )
        return nullcontext()


def discard_older(root: Path, iteration: int, *, config: RetentionConfig) -> None:
    """Delete old checkpoints until `keep_last` are left, that of `iteration` included.

    Multiples of `save_retain_interval` are kept and not counted; it alone implies `keep_last` 1. Later checkpoints than
    `iteration`, of a run that was rolled back, are kept.
    """
    keep_last, interval = config.keep_last, config.save_retain_interval
    if keep_last is None and interval is None:
        return
    older = [i for i in iterations(root) if i < iteration]
    expiring = [i for i in older if interval is None or i % interval]
    try:
        for i in expiring[: max(0, len(expiring) + 1 - (keep_last or 1))]:
            discard(folder_of(root, i))
    except OSError as error:
        flag = "--save-retain-interval" if keep_last is None else "--keep-last"
        logger.warning(f"{flag}: cannot delete an older checkpoint: {error}")


def discard(folder: Path) -> None:
    """Delete a checkpoint, after renaming it so that a crash leaves no partial one."""
    doomed = folder.with_name(f".deleting-{folder.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed)
