"""Writes a checkpoint of any origin as one of ours, in one process, with one tensor in memory at a time."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from megatron.checkpoint.checkpoint import FORMAT, VERSION, Checkpoint, saved_tokenizer
from megatron.checkpoint.foreign import Assembled
from megatron.checkpoint.manifest import Manifest, digest
from megatron.checkpoint.pieces import Index, Pieces, file_name
from megatron.checkpoint.save import write_rest
from megatron.checkpoint.storage import begin_checkpoint, finish_checkpoint, temporary_folder
from megatron.checkpoint.tensor_file import ToWrite, in_shards, write_tensors
from megatron.flags import InputError
from megatron.parallel.slices import whole
from megatron.tokenizer import build_tokenizer

# Bytes of a file of tensors.
SHARD = 4 * 10**9


def write_native(
    checkpoint: Checkpoint, root: Path, advance: Callable[[int], object], shard: int = SHARD
) -> None:
    """Write a checkpoint as the only one of the folder `root`; `advance` is told the bytes of each tensor written.

    Raises:
        InputError: the folder holds something, or a source cannot be read. Nothing is left of the checkpoint.
        OSError: it cannot be written; nor then.
    """
    check_is_empty(root)
    groups = {kind: tensors_to_write(checkpoint.pieces(kind)) for kind in checkpoint.kinds}
    existed = root.exists()
    root.mkdir(parents=True, exist_ok=True)
    folder = temporary_folder(root, checkpoint.iteration)
    try:
        needed = sum(tensor.nbytes for tensors in groups.values() for tensor in tensors.values())
        begin_checkpoint(root, checkpoint.iteration, needed)
        files: dict[str, tuple[int, str]] = {}
        indices: dict[str, Index] = {}
        for kind, tensors in groups.items():
            shards = list(in_shards(tensors, shard))
            indices[kind] = {}
            for i, part in enumerate(shards):
                path = folder / file_name(kind, i, len(shards))
                write_tensors(path, part, advance)
                files[path.name] = path.stat().st_size, digest(path)
                indices[kind] |= {name: _entry(path.name, name, tensor) for name, tensor in part.items()}
        state = checkpoint.state | {"format": FORMAT, "version": VERSION}
        files |= write_rest(folder, state, tokenizer_files(checkpoint))
        Manifest(folder, files, indices).write()
        finish_checkpoint(root, checkpoint.iteration)
    except BaseException:
        shutil.rmtree(folder if existed else root, ignore_errors=True)
        raise


def check_is_empty(root: Path) -> None:
    """Raise `InputError` unless `root` can be filled by a conversion."""
    if root.exists() and not root.is_dir():
        raise InputError(
            f"--save: {root} is not a folder; name one that is empty, or that is still to be made"
        )
    if root.exists() and any(root.iterdir()):
        raise InputError(f"--save: {root} is not empty; name a folder that is, or that is still to be made")


def tensors_to_write(tensors: Pieces | Assembled) -> dict[str, ToWrite]:
    """Whole tensors, each read when it is written."""

    def make(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return tensors.read(name, whole(*shape)).to(dtype)

    found = {}
    for name, tensor in tensors.index.items():
        shape, dtype = tuple(tensor["shape"]), getattr(torch, tensor["dtype"])
        found[name] = ToWrite(shape, dtype, functools.partial(make, name, shape, dtype))
    return found


def tokenizer_files(checkpoint: Checkpoint) -> dict[str, bytes]:
    """The content of the files of a checkpoint's tokenizer, by name; of none if it has no tokenizer."""
    config = saved_tokenizer(checkpoint)
    files = build_tokenizer(config).files if config.tokenizer_type else []
    return {file.name: file.read_bytes() for file in files}


def _entry(file: str, name: str, tensor: ToWrite) -> dict:
    """A tensor that is whole in one file, as an index has it."""
    rows, columns = tensor.shape[0], tensor.shape[1] if len(tensor.shape) > 1 else 1
    piece = [file, name, [0, rows], [0, columns]]
    return {"shape": tensor.shape, "dtype": str(tensor.dtype)[6:], "pieces": [piece]}
