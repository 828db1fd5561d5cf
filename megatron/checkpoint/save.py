"""Saving: every process writes its share of the tensors, the first one everything else."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.checkpoint import FORMAT, VERSION
from megatron.checkpoint.config import CheckpointConfig
from megatron.checkpoint.manifest import Manifest, digest
from megatron.checkpoint.pieces import Index, file_name, pieces_to_write, read_index, write_pieces
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
from megatron.parallel.mesh import Mesh
from megatron.parallel.slices import Block, GlobalSlice


def save_checkpoint(
    config: CheckpointConfig,
    state: dict[str, Any],
    *,
    mesh: Mesh,
    buffer: ParamBuffer,
    optimizer: Optimizer,
    tokenizer_files: list[Path],
) -> None:
    """Write a checkpoint of `state["iteration"]` to the folder `config.save`, and delete those that it is not to keep.

    Every process must take part, and writes its share.

    Raises:
        OSError: it cannot be written; raised by all processes if by one.
    """
    root, iteration = Path(config.save), state["iteration"]
    folder = temporary_folder(root, iteration)
    state = {"format": FORMAT, "version": VERSION, "optimizer_steps": None, **state}
    kinds = {"model": _model_pieces(buffer)}
    if config.save_optim:
        state["optimizer_steps"] = optimizer.steps
        kinds["optimizer"] = _optimizer_pieces(buffer, optimizer)
    size = sum(t.nbytes for pieces in kinds.values() for blocks in pieces.values() for _, _, t in blocks)
    needed = int(all_reduce_sum(torch.tensor([size]), mesh.world))
    try:
        with together(mesh.world):
            if mesh.is_first:
                begin_checkpoint(root, iteration, needed)
        with together(mesh.world):
            written = []
            for kind, pieces in kinds.items():
                path = folder / file_name(kind, mesh.world.rank, mesh.world.size)
                write_pieces(path, pieces)
                sync(path)
                written.append(path)
                mesh.activity.steps += 1
        files = _gather_digests(written, list(kinds), mesh)
        with together(mesh.world):
            if mesh.is_first:
                files |= _write_rest(folder, state, tokenizer_files)
                Manifest(folder, files, _join_indices(folder, files, list(kinds))).write()
                finish_checkpoint(root, iteration)
    except BaseException:
        if mesh.is_first:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    if mesh.is_first:
        discard_older(
            root, iteration, keep_last=config.keep_last, retain_interval=config.save_retain_interval
        )


def _gather_digests(paths: list[Path], kinds: list[str], mesh: Mesh) -> dict[str, tuple[int, str]]:
    """Size and checksum of the files that all processes have written."""
    numbers = []
    for path in paths:
        numbers += [path.stat().st_size, *struct.unpack("<4q", bytes.fromhex(digest(path)))]
    table = all_gather(torch.tensor([numbers]), mesh.world).view(mesh.world.size, len(kinds), 5).tolist()
    return {
        file_name(kind, rank, mesh.world.size): (size, struct.pack("<4q", *words).hex())
        for rank, row in enumerate(table)
        for kind, (size, *words) in zip(kinds, row, strict=True)
    }


def _write_rest(
    folder: Path, state: dict[str, Any], tokenizer_files: list[Path]
) -> dict[str, tuple[int, str]]:
    """Write what is not tensors; gives the files' sizes and checksums."""
    paths = [folder / "state.json"]
    paths[0].write_text(json.dumps(state, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    if tokenizer_files:
        (folder / "tokenizer").mkdir()
    for file in tokenizer_files:
        paths.append(folder / "tokenizer" / file.name)
        shutil.copyfile(file, paths[-1])
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


PiecesToWrite = dict[str, list[tuple[GlobalSlice, Block, Tensor]]]


def _model_pieces(buffer: ParamBuffer) -> PiecesToWrite:
    buffer.finish_gathers()
    return _collect("", buffer, buffer.owned(buffer.params))


def _optimizer_pieces(buffer: ParamBuffer, optimizer: Optimizer) -> PiecesToWrite:
    kinds = optimizer.moments if buffer.is_fp32 else {"master": buffer.masters, **optimizer.moments}
    pieces: PiecesToWrite = {}
    for kind, owned in kinds.items():
        pieces |= _collect(f"{kind}/", buffer, owned)
    return pieces


def _collect(prefix: str, buffer: ParamBuffer, owned: list[Tensor]) -> PiecesToWrite:
    pieces: PiecesToWrite = {}
    for entry, block, values in pieces_to_write(buffer, owned):
        pieces.setdefault(prefix + entry.name, []).append((entry.place, block, values.detach().cpu()))
    return pieces
