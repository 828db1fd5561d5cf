"""Write a checkpoint of any format in the native one, in one process, with one tensor in memory at a time."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from megatron.checkpoint.checkpoint import FORMAT, VERSION, Checkpoint
from megatron.checkpoint.manifest import Manifest
from megatron.checkpoint.pieces import Index, TensorSource, file_name
from megatron.checkpoint.save import write_rest
from megatron.checkpoint.storage import (
    begin_checkpoint,
    finish_checkpoint,
    read_digests,
    temporary_folder,
)
from megatron.checkpoint.tokenizer import saved_tokenizer
from megatron.errors import InputError
from megatron.files import read_file
from megatron.interop.tensor_writer import TensorToWrite, in_shards, write_tensors
from megatron.parallel.slices import whole
from megatron.tokenizer import build_tokenizer

# Default size of a file of tensors.
SHARD_BYTES = 4 * 10**9


def write_native(
    checkpoint: Checkpoint, root: Path, advance: Callable[[int], object], shard_bytes: int = SHARD_BYTES
) -> None:
    """Write a checkpoint to the empty folder `root`; `advance` receives the bytes of each tensor written.

    A failure leaves no files behind.

    Raises:
        InputError: the folder is not empty, or a tensor cannot be read.
        OSError: the checkpoint cannot be written.
    """
    check_is_empty(root)
    groups = {kind: tensors_to_write(checkpoint.tensors[kind]) for kind in checkpoint.tensors}
    existed = root.exists()
    root.mkdir(parents=True, exist_ok=True)
    folder = temporary_folder(root, checkpoint.iteration)
    try:
        needed = sum(tensor.nbytes for tensors in groups.values() for tensor in tensors.values())
        begin_checkpoint(root, checkpoint.iteration, needed)
        files: dict[str, tuple[int, list[str]]] = {}
        indices: dict[str, Index] = {}
        for kind, tensors in groups.items():
            shards = list(in_shards(tensors, shard_bytes))
            indices[kind] = {}
            for i, part in enumerate(shards):
                path = folder / file_name(kind, i, len(shards))
                write_tensors(path, part, advance)
                files[path.name] = path.stat().st_size, read_digests(path, whole=False)
                indices[kind] |= {name: _entry(path.name, name, tensor) for name, tensor in part.items()}
        state = checkpoint.state | {"format": FORMAT, "version": VERSION}
        files |= write_rest(folder, state, tokenizer_files(checkpoint))
        Manifest(folder, files, indices).write()
        finish_checkpoint(root, checkpoint.iteration)
    except BaseException:
        shutil.rmtree(folder if existed else root, ignore_errors=True)
        raise


def check_is_empty(root: Path) -> None:
    """Raise `InputError` unless `root` is an empty or new folder."""
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        fault = "is not empty" if root.is_dir() else "is not a folder"
        raise InputError(
            f"--save: {root} {fault}; give an empty or a new folder, or remove what a killed conversion left there"
        )


def tensors_to_write(tensors: TensorSource) -> dict[str, TensorToWrite]:
    """The whole tensors of a source, each read when it is written."""

    def make(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return tensors.read(name, whole(*shape)).to(dtype)

    to_write = {}
    for name, tensor in tensors.index.items():
        shape, dtype = tuple(tensor["shape"]), getattr(torch, tensor["dtype"])
        to_write[name] = TensorToWrite(shape, dtype, functools.partial(make, name, shape, dtype))
    return to_write


def tokenizer_files(checkpoint: Checkpoint) -> dict[str, bytes]:
    """The content of the files of a checkpoint's tokenizer, by name; empty without a tokenizer."""
    config = saved_tokenizer(checkpoint)
    files = build_tokenizer(config).files if config.tokenizer_type else []
    return {file.name: read_file(file) for file in files}


def _entry(file: str, name: str, tensor: TensorToWrite) -> dict:
    """The index entry of a tensor that is whole in one file."""
    rows, columns = tensor.shape[0], tensor.shape[1] if len(tensor.shape) > 1 else 1
    piece = [file, name, [0, rows], [0, columns]]
    return {"shape": tensor.shape, "dtype": str(tensor.dtype)[6:], "pieces": [piece]}
