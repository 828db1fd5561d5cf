"""Finds a checkpoint that Megatron-LM has written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron.checkpoint.checkpoint import Checkpoint
from megatron.checkpoint.nvidia.legacy import open_legacy
from megatron.checkpoint.nvidia.torch_dist import METADATA, open_torch_dist
from megatron.checkpoint.storage import TRACKER, folder_of, newest_iteration
from megatron.flags import InputError
from megatron.tokenizer.config import TokenizerConfig

RELEASE = "release"


def is_megatron(root: Path) -> bool:
    """Whether a folder is, or holds, a checkpoint of Megatron-LM."""
    folders = (root, root / RELEASE, *root.glob("iter_*"))
    return any((folder / METADATA).exists() or any(folder.glob("mp_rank_*")) for folder in folders)


def open_megatron(
    load: Path,
    tokenizer: TokenizerConfig,
    given: Mapping[str, Any] = MappingProxyType({}),
    *,
    load_optim: bool = True,
) -> Checkpoint:
    """The newest checkpoint of Megatron-LM in the folder `load`, or the one that the folder itself is.

    Args:
        tokenizer: where it has a type or `vocab_size`, how many ids there are; mostly the files do not say.
        given: fields of the model's config, for what the files do not say: where they do not hold the flags of the
            run, `num_attention_heads`.
        load_optim: read the state of the optimizer too, where there is one.

    Raises:
        InputError: there is none, it is not whole, or not of a GPT or BERT.
    """
    if load.is_file():
        raise InputError(f"--load: {load} is a file; unzip it if it is a zip, and give the folder")
    if not load.is_dir():
        raise InputError(f"--load: {load} is not a folder")
    folder = load if any(load.glob("mp_rank_*")) or (load / METADATA).exists() else _newest(load)
    if (folder / METADATA).exists():
        return open_torch_dist(folder, tokenizer, given)
    return open_legacy(folder, tokenizer, given, release=folder.name == RELEASE, load_optim=load_optim)


def _newest(load: Path) -> Path:
    """The folder that the tracker of `load` names."""
    tracker = load / TRACKER
    if (
        tracker.is_file()
        and tracker.stat().st_size < 100
        and tracker.read_bytes().strip() == RELEASE.encode()
    ):
        if not (load / RELEASE).is_dir():
            raise InputError(f"{tracker}: names the release, but there is no {load / RELEASE}")
        return load / RELEASE
    iteration = newest_iteration(load)
    if iteration is None:
        raise InputError(
            f"--load: {load} holds no checkpoint of Megatron-LM (neither {TRACKER} nor mp_rank_00)"
        )
    return folder_of(load, iteration)
