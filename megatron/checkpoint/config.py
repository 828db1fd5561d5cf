"""Flags for saving and loading checkpoints."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from megatron.errors import InputError
from megatron.flags import Config, flag

SAVE_MINUTES = 30  # between checkpoints, without --save-interval


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Config):
    """Saving and loading of checkpoints."""

    save: str | None = flag(None, "folder to write checkpoints to", metavar="DIR")
    save_interval: int | None = flag(
        None,
        f"iterations between checkpoints, beside the one when the run ends or stops (default: {SAVE_MINUTES} minutes)",
        low=1,
    )
    load: str | None = flag(
        None,
        "folder of checkpoints to load the newest of; may be empty if it is also --save. With --finetune: also the "
        "folder of a Hugging Face model",
        metavar="DIR",
    )
    ckpt_step: int | None = flag(None, "iteration of the checkpoint to load (default: the newest)", low=0)
    verify_checkpoint: bool = flag(
        True, "do not compare the checksums of a checkpoint's files before loading it"
    )
    finetune: bool = flag(False, "load only the weights and start at iteration 0")
    load_optim: bool = flag(True, "do not load the optimizer state")
    save_optim: bool = flag(True, "do not save the optimizer state; the run cannot be resumed exactly")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ckpt_step is not None and self.load is None:
            raise InputError(f"--ckpt-step: {self.ckpt_step} needs --load, the folder of the checkpoints")
        if self.save is None:
            if self.save_interval is not None:
                raise InputError(
                    f"--save-interval: {self.save_interval} needs --save, the folder to write checkpoints to"
                )
        elif Path(self.save).is_symlink() and not Path(self.save).exists():
            raise InputError(f"--save: {self.save} is a link to nothing; make the folder that it leads to")
