"""Sharded tensors in safetensors files: each process writes its own pieces and reads the ones that overlap its shards.

A piece is a block of a whole tensor, viewed as a matrix. The name of a piece ends in the block's ranges unless it is
the whole tensor: `decoder.final_layernorm.weight[0:512]`, `decoder.layers.0.mlp.linear_fc1.weight[0:128,0:64]`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from multiprocessing.pool import AsyncResult
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron.checkpoint.storage import write_file
from megatron.checkpoint.tensor_file import DTYPES, TensorFile
from megatron.errors import InputError
from megatron.optim.buffer import ParamBuffer
from megatron.optim.layout import Bucket, FlatParam
from megatron.parallel.slices import Block, GlobalSlice, Range, flat_blocks, overlap

NAMES = {dtype: name for name, dtype in DTYPES.items()}
# Shape, dtype (without "torch.") and pieces of each whole tensor, by name.
Index = dict[str, dict[str, Any]]
# Pieces to write to a file, by the name of the whole tensor: shard spec, block of the whole tensor, values.
PiecesToWrite = dict[str, list[tuple[GlobalSlice, Block, Tensor]]]


class TensorSource(Protocol):
    """The tensors of one kind in a checkpoint, read from its files on demand.

    Every method raises `InputError` if a file is missing or damaged, or if the tensor has another shape.
    """

    @property
    def folder(self) -> Path: ...

    @property
    def index(self) -> Index: ...

    def read(self, name: str, spec: GlobalSlice) -> Tensor:
        """Read a shard of a tensor, in fp32; rows that pad the vocabulary are zero."""

    def read_into(self, target: Tensor, name: str, spec: GlobalSlice, begin: int) -> None:
        """Fill the flat `target` with consecutive elements of the flattened shard, from element `begin` on."""


def file_name(kind: str, rank: int, ranks: int) -> str:
    """Name of the file to which a rank writes its tensors of the `kind` "model" or "optimizer"."""
    return f"{kind}.safetensors" if ranks == 1 else f"{kind}-{rank + 1:05d}-of-{ranks:05d}.safetensors"


def written_range(bucket: Bucket) -> Range:
    """Range of a bucket that this rank writes.

    Each of the ranks that hold the local shard writes an equal part of it; without the distributed optimizer these are
    all replicas.
    """
    group, (start, stop) = bucket.group, bucket.shard
    holders = group.instance_axis if group.shard_axis.size > 1 else group.reduce_axis
    begin, end = ((stop - start) * rank // holders.size for rank in (holders.rank, holders.rank + 1))
    return start + begin, start + end


def written_parts(buffer: ParamBuffer, shards: list[Tensor]) -> list[Tensor]:
    """Views of the part that this rank writes of its local shard of each bucket."""
    parts = []
    for bucket, shard in zip(buffer.buckets, shards, strict=True):
        begin, end = written_range(bucket)
        parts.append(shard[begin - bucket.shard[0] : end - bucket.shard[0]])
    return parts


def pieces_to_write(buffer: ParamBuffer, by_prefix: dict[str, list[Tensor]]) -> PiecesToWrite:
    """Divide what this rank writes into pieces. The pieces of all ranks cover each whole tensor without overlap.

    Args:
        by_prefix: results of `written_parts`, by the prefix of the tensors' names.
    """
    pieces: PiecesToWrite = {}
    for prefix, parts in by_prefix.items():
        for bucket, part in zip(buffer.buckets, parts, strict=True):
            written = written_range(bucket)
            for param in bucket.flat_params if len(part) else ():
                both, spec = overlap(written, (param.start, param.end)), param.shard_spec
                for local, whole in _blocks(param, both) if both is not None else ():
                    begin = param.start - written[0] + local.rows[0] * spec.row + local.columns[0]
                    rows, columns = local.shape
                    shape = (rows,) if len(spec.shape) == 1 else (rows, columns)
                    values = part[begin : begin + rows * columns].view(shape)
                    pieces.setdefault(prefix + param.name, []).append((spec, whole, values))
    return pieces


def _blocks(param: FlatParam, flat: Range) -> Iterator[tuple[Block, Block]]:
    """Split a range of flat memory into blocks of the local tensor; yield each with its block in the whole tensor."""
    row = param.shard_spec.row
    for part in flat_blocks(flat[0] - param.start, flat[1] - param.start, row):
        for counted in param.counted():
            for local, whole in param.shard_spec.blocks():
                both = part.intersect(Block(counted, (0, row)))
                both = both and both.intersect(local)
                if both is not None:
                    yield both, both.translated(local, whole)


def write_pieces(path: Path, pieces: PiecesToWrite) -> AsyncResult[list[str]]:
    """Write pieces to a safetensors file, with their part of the index in its metadata.

    `write_file` computes the digests while it writes; after safetensors' own writer they would take a second pass.

    Raises:
        OSError: the file cannot be written.
    """
    header: dict[str, Any] = {}
    index: Index = {}
    parts: list[memoryview] = []
    end = 0
    for name, blocks in pieces.items():
        for spec, block, values in blocks:
            shape = spec.shape if spec.num_valid_rows is None else (spec.num_valid_rows, *spec.shape[1:])
            key, dtype = piece_key(name, block, shape), str(values.dtype).removeprefix("torch.")
            offsets = [end, end := end + values.nbytes]
            header[key] = {"dtype": NAMES[values.dtype], "shape": values.shape, "data_offsets": offsets}
            parts.append(values.detach().cpu().view(-1).view(torch.uint8).numpy().data)
            tensor = index.setdefault(name, {"shape": shape, "dtype": dtype, "pieces": []})
            tensor["pieces"].append([path.name, key, block.rows, block.columns])
    text = json.dumps({"__metadata__": {"index": json.dumps(index)}, **header}).encode()
    text += b" " * (-len(text) % 8)  # aligns the tensors
    return write_file(path, [memoryview(len(text).to_bytes(8, "little") + text), *parts])


def piece_key(name: str, block: Block, shape: tuple[int, ...]) -> str:
    """Name of a piece in its file."""
    if block == Block((0, shape[0]), (0, math.prod(shape[1:]))):
        return name
    ranges = (block.rows,) if len(shape) == 1 else (block.rows, block.columns)
    return f"{name}[{','.join(f'{begin}:{end}' for begin, end in ranges)}]"


@dataclasses.dataclass
class NativeTensors:
    """Tensors of a native checkpoint, a `TensorSource`. Pieces cover them exactly, as `read_manifest` checks."""

    folder: Path
    index: Index
    opened: dict[str, TensorFile] = dataclasses.field(default_factory=dict, init=False)

    def read(self, name: str, spec: GlobalSlice) -> Tensor:
        check_shape(self.folder, self.index, name, spec)  # before memory is allocated
        values = torch.zeros(math.prod(spec.local_shape))
        self.read_into(values, name, spec, 0)
        return values.view(spec.local_shape)

    def read_into(self, target: Tensor, name: str, spec: GlobalSlice, begin: int) -> None:
        check_shape(self.folder, self.index, name, spec)
        rows = spec.shape[0] if spec.num_valid_rows is None else spec.num_valid_rows
        for part in flat_blocks(begin, begin + target.numel(), spec.row):
            for local, whole in spec.blocks():
                needed = part.intersect(local)
                # Rows that pad the vocabulary are not stored.
                needed = needed and needed.translated(local, whole).intersect(Block((0, rows), (0, 2**62)))
                if needed is None:
                    continue
                for file, key, (top, bottom), (left, right) in self.index[name]["pieces"]:
                    piece = Block((top, bottom), (left, right))
                    both = needed.intersect(piece)
                    if both is None:
                        continue
                    if file not in self.opened:
                        self.opened[file] = TensorFile(self.folder / file)
                    at = both.translated(whole, local)
                    start = at.rows[0] * spec.row + at.columns[0] - begin + target.storage_offset()
                    self.opened[file].read_into(
                        target.as_strided(both.shape, (spec.row, 1), start),
                        key,
                        both.translated(piece, Block((0, 0), (0, 0))),
                    )


def check_shape(folder: Path, index: Index, name: str, spec: GlobalSlice) -> None:
    """Raise `InputError` if the index lacks the tensor `name`, or its shape does not match `spec`."""
    if name not in index:
        raise InputError(f"{folder}: lacks the tensor {name}")
    shape = tuple(index[name]["shape"])
    fits = shape[:1] == spec.shape[:1] if spec.num_valid_rows is None else shape[0] >= spec.num_valid_rows
    if not fits or shape[1:] != spec.shape[1:]:
        raise InputError(f"{folder}: {name} has shape {shape}, but the model has {spec.shape}")
