"""Saving: every process writes its share of the tensors, the first one everything else."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
import struct
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.checkpoint import FORMAT, VERSION
from megatron.checkpoint.config import CheckpointConfig
from megatron.checkpoint.manifest import Manifest, digest
from megatron.checkpoint.pieces import (
    Index,
    PiecesToWrite,
    file_name,
    pieces_to_write,
    read_index,
    shares,
    write_pieces,
)
from megatron.checkpoint.storage import (
    begin_checkpoint,
    discard_older,
    finish_checkpoint,
    sync,
    temporary_folder,
)
from megatron.optim.buffer import ParamBuffer
from megatron.optim.optimizer import Optimizer
from megatron.parallel.collectives import all_gather, all_reduce_sum, together
from megatron.parallel.mesh import Axis

logger = logging.getLogger("megatron")


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """What this process writes of a checkpoint.

    Attributes:
        state: content of state.json, without its format and version.
        tensors: of each kind, "model" or "optimizer", and each group of tensors, by what stands before a parameter's
            name: the `shares` of the group's flat memory.
    """

    state: dict[str, Any]
    tensors: dict[str, dict[str, list[Tensor]]]


def take_snapshot(
    config: CheckpointConfig, state: dict[str, Any], buffer: ParamBuffer, optimizer: Optimizer
) -> Snapshot:
    """A checkpoint of now. Its tensors are those of the run itself, which the next step changes."""
    buffer.finish_gathers()
    groups = {"model": {"": buffer.owned(buffer.params)}}
    if config.save_optim:
        masters = {} if buffer.is_fp32 else {"master": buffer.masters}
        groups["optimizer"] = {f"{name}/": owned for name, owned in (masters | optimizer.moments).items()}
    tensors = {
        kind: {prefix: shares(buffer, owned) for prefix, owned in group.items()}
        for kind, group in groups.items()
    }
    return Snapshot({"optimizer_steps": optimizer.steps if config.save_optim else None, **state}, tensors)


def write_checkpoint(
    config: CheckpointConfig,
    snapshot: Snapshot,
    buffer: ParamBuffer,
    world: Axis,
    tokenizer_files: dict[str, bytes],
) -> None:
    """Write a checkpoint to the folder `config.save`, and delete those that it is not to keep.

    Every process of `world`, all of the run, must take part, and writes its share.

    Args:
        buffer: says where in the model the snapshot's tensors lie; its values are not read.
        tokenizer_files: content of the tokenizer's files, by name.

    Raises:
        OSError: it cannot be written; raised by all processes if by one.
    """
    root, iteration, first = Path(config.save), snapshot.state["iteration"], world.rank == 0
    folder = temporary_folder(root, iteration)
    kinds = {kind: _collect(buffer, group) for kind, group in snapshot.tensors.items()}
    size = sum(t.nbytes for pieces in kinds.values() for blocks in pieces.values() for _, _, t in blocks)
    needed = int(all_reduce_sum(torch.tensor([size]), world))
    try:
        with together(world):
            if first:
                begin_checkpoint(root, iteration, needed)
        with together(world):
            numbers = []
            for kind, pieces in kinds.items():
                path = folder / file_name(kind, world.rank, world.size)
                write_pieces(path, pieces)
                sync(path)
                numbers += [path.stat().st_size, *struct.unpack("<4q", bytes.fromhex(digest(path)))]
                buffer.mesh.activity.steps += 1
        files = _gather_digests(numbers, list(kinds), world)
        with together(world):
            if first:
                state = {"format": FORMAT, "version": VERSION, **snapshot.state}
                files |= write_rest(folder, state, tokenizer_files)
                Manifest(folder, files, _join_indices(folder, files, list(kinds))).write()
                finish_checkpoint(root, iteration)
    except BaseException:
        if first:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    if first:
        keep = {"keep_last": config.keep_last, "retain_interval": config.save_retain_interval}
        try:
            discard_older(root, iteration, **keep)
        except OSError as error:
            logger.warning(f"--keep-last: an older checkpoint cannot be deleted: {error}")


def _gather_digests(numbers: list[int], kinds: list[str], world: Axis) -> dict[str, tuple[int, str]]:
    """Size and checksum of the files that all processes have written, from those of this one."""
    table = all_gather(torch.tensor([numbers]), world).view(world.size, len(kinds), 5).tolist()
    return {
        file_name(kind, rank, world.size): (size, struct.pack("<4q", *words).hex())
        for rank, row in enumerate(table)
        for kind, (size, *words) in zip(kinds, row, strict=True)
    }


def write_rest(
    folder: Path, state: dict[str, Any], tokenizer_files: dict[str, bytes]
) -> dict[str, tuple[int, str]]:
    """Write what is not tensors; gives the files' sizes and checksums."""
    paths = [folder / "state.json"]
    paths[0].write_text(json.dumps(state, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    if tokenizer_files:
        (folder / "tokenizer").mkdir()
    for name, content in tokenizer_files.items():
        paths.append(folder / "tokenizer" / name)
        paths[-1].write_bytes(content)
    return {str(path.relative_to(folder)): (path.stat().st_size, digest(path)) for path in paths}


def _join_indices(folder: Path, files: dict, kinds: list[str]) -> dict[str, Index]:
    """The index of the whole checkpoint, from those of its files of tensors."""
    joined: dict[str, Index] = {kind: {} for kind in kinds}
    for file in files:
        kind = file.split(".")[0].split("-")[0]
        if kind in joined and file.endswith(".safetensors"):
            for name, tensor in read_index(folder / file).items():
                joined[kind].setdefault(name, tensor | {"pieces": []})["pieces"] += tensor["pieces"]
    return joined


def _collect(buffer: ParamBuffer, by_prefix: dict[str, list[Tensor]]) -> PiecesToWrite:
    """The pieces of a file, by the names of whole tensors."""
    pieces: PiecesToWrite = {}
    for prefix, mine in by_prefix.items():
        for entry, block, values in pieces_to_write(buffer, mine):
            pieces.setdefault(prefix + entry.name, []).append((entry.place, block, values))
    return pieces
