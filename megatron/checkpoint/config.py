"""Flags of saving and loading."""

from __future__ import annotations

import dataclasses

from megatron.flags import Config, InputError, flag


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Config):
    """Where checkpoints go, how often, and what a run starts from."""

    save: str | None = flag(None, "folder that checkpoints are written to", metavar="DIR")
    save_interval: int | None = flag(
        None, "iterations between checkpoints (default: save only where the run ends or is stopped)", low=1
    )
    keep_last: int | None = flag(
        None, "keep this many of the newest checkpoints and delete the others", low=1
    )
    save_retain_interval: int | None = flag(
        None,
        "keep the checkpoints of iterations that are multiples of this for good; the others go as --keep-last says, or "
        "without it as soon as there is a newer one",
        low=1,
    )
    async_save: bool = flag(
        False,
        "go on training while a checkpoint is written, from a copy in the host's memory; the next save waits for the "
        "last, and so does the end of the run",
    )
    load: str | None = flag(
        None,
        "folder whose newest checkpoint the run starts from; if it is that of --save, it may be empty still; with "
        "--finetune also a local folder of a Hugging Face model",
        metavar="DIR",
    )
    ckpt_step: int | None = flag(
        None, "iteration of the checkpoint of --load to start from (default: the newest)", low=0
    )
    use_checkpoint_args: bool = flag(
        False,
        "take the model's architecture from the checkpoint of --load, whatever the command line says; and where it "
        "says nothing, --seq-length, dropout and the tokenizer",
    )
    verify_checkpoint: bool = flag(
        False,
        "compare the checksums of all files before loading; a run that continues from the folder of --save always does",
    )
    finetune: bool = flag(False, "load the weights alone and begin at iteration 0")
    load_optim: bool = flag(True, "do not load the state of the optimizer")
    save_optim: bool = flag(
        True, "do not save the state of the optimizer; such a run cannot be resumed exactly"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ckpt_step is not None and self.load is None:
            raise InputError(
                f"--ckpt-step: {self.ckpt_step} needs --load, the folder that holds the checkpoint"
            )
        if self.use_checkpoint_args and self.load is None:
            raise InputError("--use-checkpoint-args needs --load, the folder of the checkpoint that has them")
        if self.save is None:
            given = {"--save-interval": self.save_interval, "--keep-last": self.keep_last}
            given["--save-retain-interval"] = self.save_retain_interval
            for name, value in given.items():
                if value is not None:
                    raise InputError(
                        f"{name}: {value} needs --save, the folder that checkpoints are written to"
                    )
            if self.async_save:
                raise InputError("--async-save needs --save, the folder that checkpoints are written to")
