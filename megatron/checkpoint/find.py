"""Find the checkpoint that a run loads."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from megatron.checkpoint.checkpoint import Checkpoint, open_checkpoint
from megatron.checkpoint.formats import FORMATS, why_not
from megatron.checkpoint.storage import TRACKER, folder_of, iterations, newest_iteration
from megatron.errors import InputError
from megatron.flags import either
from megatron.parallel.collectives import raise_on_all_ranks
from megatron.parallel.mesh import ALONE, Axis


def find_checkpoint(
    load: str,
    save: str | None,
    *,
    step: int | None = None,
    verify: bool = True,
    weights_only: bool = False,
    world: Axis = ALONE,
) -> Checkpoint | None:
    """Find the newest checkpoint in the folder `load`, or the one of iteration `step`.

    If `load` and `save` are the same folder, the run resumes from it: the folder may be empty (returns None), the
    tracker may be missing, and a damaged or missing checkpoint is skipped for the one before. Collective over `world`.

    Args:
        verify: compare the checksums of the files; `world` shares the work. Checkpoints of other formats have none.
        weights_only: the optimizer's files will not be read, and need not be verified.

    Raises:
        InputError: there is no checkpoint, or it is damaged.
    """
    root = Path(load)
    resumes = save is not None and root.resolve() == Path(save).resolve()
    with raise_on_all_ranks(world, InputError):
        external = next((format for format in FORMATS.values() if format.recognizes(root)), None)
        if external is not None:
            if step is not None:
                raise InputError(
                    f"--ckpt-step: {load} is a {external.name} checkpoint, which has no iterations"
                )
            return external.open(root)
        iteration = newest_iteration(root, exists=not resumes) if step is None else step
        if iteration is None and resumes:  # killed after the first checkpoint was written, before its tracker
            iteration = max(iterations(root), default=None)
    if iteration is not None:
        if step is not None and step not in iterations(root):
            found = ", ".join(map(str, iterations(root))) or "none"
            raise InputError(f"--ckpt-step: {load} holds no checkpoint of iteration {step}; it holds {found}")
        older = [i for i in iterations(root) if i < iteration] if resumes and step is None else []
        passed_over: list[str] = []
        for i in (iteration, *reversed(older)):
            try:
                with raise_on_all_ranks(world, InputError):
                    checkpoint = open_checkpoint(folder_of(root, i))
                    if verify:
                        checkpoint.verify(weights_only=weights_only, part=slice(world.rank, None, world.size))
                return dataclasses.replace(checkpoint, passed_over=tuple(passed_over))
            except InputError as error:
                passed_over.append(str(error))
        raise InputError(passed_over[0] + ("; the older checkpoints are damaged too" if older else ""))
    if root.is_dir() and iterations(root):
        raise InputError(
            f"--load: {load} holds {folder_of(root, iterations(root)[-1]).name} but no iteration in {TRACKER}, so it "
            "may be incomplete; write the iteration to that file to load it"
        )
    if resumes:
        return None
    if (root / "index.json").is_file() and re.fullmatch(r"iter_[0-9]{7,}", root.name):
        raise InputError(
            f"--load: {load} is one checkpoint of a run; give its parent folder, and --ckpt-step {int(root.name[5:])} "
            "if it is not the newest"
        )
    others = f" and no {either(FORMATS)} checkpoint" if FORMATS else ""
    raise InputError(f"--load: {load} {why_not(root, f'checkpoint (no {TRACKER}){others}')}")
