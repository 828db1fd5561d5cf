"""How a checkpoint is found."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from megatron.checkpoint.checkpoint import Checkpoint, open_checkpoint
from megatron.checkpoint.huggingface.read import is_huggingface, open_huggingface, why_not
from megatron.checkpoint.nvidia.read import is_megatron
from megatron.checkpoint.storage import folder_of, iterations, newest_iteration
from megatron.flags import InputError, either
from megatron.parallel.collectives import together
from megatron.parallel.mesh import ALONE, Axis


def find_checkpoint(
    load: str, save: str | None, *, step: int | None = None, verify: bool | None = None, world: Axis = ALONE
) -> Checkpoint | None:
    """The newest checkpoint of the folder `load`, or that of iteration `step`; or the model there if it is a folder of
    Hugging Face's; None if it may be empty, being that of `save`, and is.

    If `load` is the folder of `save`, the run continues itself: a checkpoint that is damaged is passed over for the
    one before it, and the tracker may be missing. Every process of `world` must take part.

    Args:
        verify: compare the checksums of all files (default: if the run continues itself).

    Raises:
        InputError: there is no checkpoint, or it is not whole.
    """
    root = Path(load)
    continues = save is not None and root.resolve() == Path(save).resolve()
    with together(world, InputError):
        if is_megatron(root):
            raise InputError(
                f"--load: {load} holds a checkpoint of NVIDIA's Megatron-LM; make it one of this program with "
                "tools/convert_checkpoint.py --from megatron --to native"
            )
        iteration = newest_iteration(root) if step is None else step
        if iteration is None and continues:  # killed after its first checkpoint, and before the tracker of it
            iteration = max(iterations(root), default=None)
    if iteration is not None:
        if step is not None and step not in iterations(root):
            there = f"it holds those of {either(iterations(root))}" if iterations(root) else "it holds none"
            raise InputError(f"--ckpt-step: {load} holds no checkpoint of iteration {step}; {there}")
        older = [i for i in iterations(root) if i < iteration] if continues and step is None else []
        passed_over: list[str] = []
        for i in (iteration, *reversed(older)):
            try:
                with together(world, InputError):
                    found = open_checkpoint(folder_of(root, i))
                    if continues if verify is None else verify:
                        found.manifest.verify(sorted(found.manifest.files)[world.rank :: world.size])
                return dataclasses.replace(found, passed_over=tuple(passed_over))
            except InputError as error:
                passed_over.append(str(error))
        raise InputError(passed_over[0] + ("; nor is an older checkpoint whole" if older else ""))
    if is_huggingface(root):
        if verify:
            raise InputError(
                f"--verify-checkpoint: {load} is a folder of Hugging Face's, which has no checksums"
            )
        with together(world, InputError):
            return open_huggingface(root)
    if root.is_dir() and iterations(root):
        raise InputError(
            f"--load: {load} holds {folder_of(root, iterations(root)[-1]).name}, but no "
            "latest_checkpointed_iteration.txt to say that it is whole; write the number there to load it"
        )
    if continues:
        return None
    if (root / "index.json").is_file() and re.fullmatch(r"iter_[0-9]{7,}", root.name):
        raise InputError(
            f"--load: {load} is one checkpoint of a run; give the folder that it is in, and --ckpt-step "
            f"{int(root.name[5:])} if it is not the newest there"
        )
    wanted = "checkpoint (no latest_checkpointed_iteration.txt), and no config.json of Hugging Face's"
    raise InputError(f"--load: {load} {why_not(root, wanted)}")
