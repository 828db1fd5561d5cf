"""Find and open a checkpoint of Megatron-LM."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron.checkpoint.checkpoint import Checkpoint
from megatron.checkpoint.storage import TRACKER, folder_of, newest_iteration
from megatron.errors import InputError
from megatron.interop.nvidia.chunks import METADATA
from megatron.interop.nvidia.legacy import open_legacy
from megatron.interop.nvidia.torch_dist import open_torch_dist
from megatron.tokenizer.config import TokenizerConfig

RELEASE = "release"


def is_megatron(root: Path) -> bool:
    """True if a folder is, or holds, a checkpoint of Megatron-LM."""
    folders = (root, root / RELEASE, *root.glob("iter_*"))
    return any((folder / METADATA).exists() or any(folder.glob("mp_rank_*")) for folder in folders)


def open_megatron(
    load: Path,
    tokenizer: TokenizerConfig,
    given: Mapping[str, Any] = MappingProxyType({}),
    *,
    load_optim: bool = True,
) -> Checkpoint:
    """Open the newest Megatron-LM checkpoint in the folder `load`, or the folder itself if it is one.

    Args:
        tokenizer: gives the vocabulary size, by its type or `vocab_size`, which most checkpoints lack.
        given: fields of the model's config that the checkpoint lacks, such as `num_attention_heads` if it does not hold
            the flags of its run.
        load_optim: read the optimizer state too, if there is one.

    Raises:
        InputError: there is no checkpoint, it is incomplete, or it holds no GPT or BERT.
    """
    if load.is_file():
        raise InputError(f"--load: {load} is a file; unzip it if it is an archive, and give the folder")
    if not load.is_dir():
        raise InputError(f"--load: {load} is not a folder")
    folder = load if any(load.glob("mp_rank_*")) or (load / METADATA).exists() else _newest(load)
    if (folder / METADATA).exists():
        return open_torch_dist(folder, tokenizer, given, load_optim=load_optim)
    return open_legacy(folder, tokenizer, given, release=folder.name == RELEASE, load_optim=load_optim)


def _newest(load: Path) -> Path:
    """The folder of the checkpoint in the tracker of `load`."""
    tracker = load / TRACKER
    if (
        tracker.is_file()
        and tracker.stat().st_size < 100
        and tracker.read_bytes().strip() == RELEASE.encode()
    ):
        if not (load / RELEASE).is_dir():
            raise InputError(f"{tracker}: names a release, but there is no {load / RELEASE}")
        return load / RELEASE
    iteration = newest_iteration(load)
    if iteration is None:
        raise InputError(f"--load: {load} holds no Megatron-LM checkpoint (neither {TRACKER} nor mp_rank_00)")
    return folder_of(load, iteration)
