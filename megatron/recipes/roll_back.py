"""Roll back of a run to an earlier checkpoint (--ckpt-step), in the folder that it saves to.

DIR/taken_back_to_iteration.txt has the last --ckpt-step to which the run was rolled back.
"""

from __future__ import annotations

import dataclasses
import logging
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from megatron.checkpoint.storage import TRACKER, TRACKER_BYTES, folder_of, iterations, replace_text
from megatron.files import read_file
from megatron.parallel.collectives import raise_on_all_ranks
from megatron.training.config import RunConfig
from megatron.training.loop import Hook, Trainer
from megatron.training.start import resumes

logger = logging.getLogger("megatron")

ROLLED_BACK = "taken_back_to_iteration.txt"


def without_repetition(config: RunConfig) -> RunConfig:
    """Return the configuration without a --ckpt-step to which the run was rolled back already.

    The same command has trained further since, and resumes from its newest checkpoint.
    """
    checkpoint = config.checkpoint
    if not resumes(checkpoint) or checkpoint.ckpt_step is None:
        return config
    if rolled_back_to(Path(checkpoint.load or "")) != checkpoint.ckpt_step:
        return config
    return dataclasses.replace(config, checkpoint=dataclasses.replace(checkpoint, ckpt_step=None))


class RollBack(Hook):
    """Make the checkpoint of --ckpt-step, which the run has loaded, the newest of its folder."""

    def during_run(self, trainer: Trainer) -> AbstractContextManager[object]:
        config, mesh = trainer.config.checkpoint, trainer.mesh
        if resumes(config) and config.ckpt_step is not None:
            with raise_on_all_ranks(mesh.world):
                if mesh.is_first and (kept := roll_back(Path(config.load or ""), config.ckpt_step)):
                    logger.info(f"--ckpt-step: later checkpoints are kept as {kept[0]} ({len(kept)} in all)")
        return nullcontext()


def rolled_back_to(root: Path) -> int | None:
    """The iteration to which the run in `root` was last rolled back; None if it never was."""
    try:
        return int(read_file(root / ROLLED_BACK, TRACKER_BYTES))
    except (OSError, ValueError):
        return None


def roll_back(root: Path, iteration: int) -> list[Path]:
    """Make an iteration's checkpoint the newest of `root`; returns the new names of later checkpoints."""
    replace_text(root / TRACKER, str(iteration))
    kept = []
    for later in [i for i in iterations(root) if i > iteration]:
        folder, number = folder_of(root, later), 1
        while (name := root / f"abandoned-{folder.name}-{number}").exists():
            number += 1
        folder.rename(name)
        kept.append(name)
    replace_text(root / ROLLED_BACK, str(iteration))
    return kept
