"""Write a checkpoint of any format in the native one, in one process, with one tensor or expert in memory."""

from __future__ import annotations

import functools
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from megatron.checkpoint.checkpoint import FORMAT, VERSION, Checkpoint
from megatron.checkpoint.manifest import Manifest
from megatron.checkpoint.pieces import Index, TensorSource, file_name, piece_key
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
from megatron.interop.external import rows_of_parts
from megatron.interop.tensor_writer import TensorToWrite, in_shards, write_tensors
from megatron.parallel.slices import Block, GlobalSlice
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
    groups = {kind: parts_to_write(checkpoint.tensors[kind]) for kind in checkpoint.tensors}
    existed = root.exists()
    root.mkdir(parents=True, exist_ok=True)
    folder = temporary_folder(root, checkpoint.iteration)
    try:
        needed = sum(piece.nbytes for pieces, _ in groups.values() for piece in pieces.values())
        begin_checkpoint(root, checkpoint.iteration, needed)
        files: dict[str, tuple[int, list[str]]] = {}
        indices: dict[str, Index] = {}
        for kind, (pieces, blocks) in groups.items():
            shards = list(in_shards(pieces, shard_bytes))
            stored = checkpoint.tensors[kind].index
            indices[kind] = {
                name: {"shape": tensor["shape"], "dtype": tensor["dtype"], "pieces": []}
                for name, tensor in stored.items()
            }
            for i, part in enumerate(shards):
                path = folder / file_name(kind, i, len(shards))
                write_tensors(path, part, advance)
                files[path.name] = path.stat().st_size, read_digests(path, whole=False)
                for key in part:
                    name, block = blocks[key]
                    indices[kind][name]["pieces"].append([path.name, key, block.rows, block.columns])
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


def parts_to_write(
    tensors: TensorSource,
) -> tuple[dict[str, TensorToWrite], dict[str, tuple[str, Block]]]:
    """The parts of the tensors of a source, each read when it is written, and the name and block of each."""

    def make(name: str, spec: GlobalSlice, dtype: torch.dtype) -> Tensor:
        return tensors.read(name, spec).to(dtype)

    to_write, blocks = {}, {}
    for name, tensor in tensors.index.items():
        shape, dtype = tuple(tensor["shape"]), getattr(torch, tensor["dtype"])
        for rows in rows_of_parts(shape[0], tensor.get("parts", 1)):
            spec, block = GlobalSlice(shape, 0, (rows,)), Block(rows, (0, math.prod(shape[1:])))
            key = piece_key(name, block, shape)
            blocks[key] = name, block
            make_piece = functools.partial(make, name, spec, dtype)
            to_write[key] = TensorToWrite(spec.local_shape, dtype, make_piece)
    return to_write, blocks


def tokenizer_files(checkpoint: Checkpoint) -> dict[str, bytes]:
    """The content of the files of a checkpoint's tokenizer, by name; empty without a tokenizer."""
    config = saved_tokenizer(checkpoint)
    files = build_tokenizer(config).files if config.tokenizer_type else []
    return {file.name: read_file(file) for file in files}
