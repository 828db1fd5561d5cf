"""Roll back of a run to an earlier checkpoint (--ckpt-step), in the folder that it saves to."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from megatron.checkpoint.storage import TRACKER, folder_of, iterations, replace_text
from megatron.parallel.collectives import raise_on_all_ranks
from megatron.settings.rolled_back import ROLLED_BACK
from megatron.training.loop import Hook, Trainer
from megatron.training.start import resumes

logger = logging.getLogger("megatron")


class RollBack(Hook):
    """Make the checkpoint of --ckpt-step, which the run has loaded, the newest of its folder."""

    def during_run(self, trainer: Trainer) -> AbstractContextManager[object]:
        config, mesh = trainer.config.checkpoint, trainer.mesh
        if resumes(config) and config.ckpt_step is not None:
            with raise_on_all_ranks(mesh.world):
                if mesh.is_first and (kept := roll_back(Path(config.load or ""), config.ckpt_step)):
                    logger.info(f"--ckpt-step: later checkpoints are kept as {kept[0]} ({len(kept)} in all)")
        return nullcontext()


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
