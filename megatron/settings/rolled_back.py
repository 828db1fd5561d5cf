"""A --ckpt-step that was used already, when the command that rolled a run back is given again.

DIR/taken_back_to_iteration.txt has the last --ckpt-step to which the run in DIR was rolled back.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from megatron.checkpoint.config import CheckpointConfig
from megatron.checkpoint.storage import TRACKER_BYTES
from megatron.files import read_file
from megatron.training.start import resumes

ROLLED_BACK = "taken_back_to_iteration.txt"


def without_repetition(config: CheckpointConfig) -> CheckpointConfig:
    """Return the configuration without a --ckpt-step to which the run was rolled back already.

    The same command has trained further since, and resumes from its newest checkpoint.
    """
    if not resumes(config) or config.ckpt_step is None:
        return config
    if rolled_back_to(Path(config.load or "")) != config.ckpt_step:
        return config
    return dataclasses.replace(config, ckpt_step=None)


def rolled_back_to(root: Path) -> int | None:
    """The iteration to which the run in `root` was last rolled back; None if it never was."""
    try:
        return int(read_file(root / ROLLED_BACK, TRACKER_BYTES))
    except (OSError, ValueError):
        return None
