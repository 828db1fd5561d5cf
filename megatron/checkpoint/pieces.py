"""Tensors in safetensors files: each process writes its pieces, and reads the pieces that it needs.

A piece is a block of a whole tensor, seen as a matrix. Where a piece is not the whole tensor, its name in the file
says which block it is, as an index of Python would: `decoder.final_layernorm.weight[0:512]`,
`decoder.layers.0.mlp.linear_fc1.weight[0:128,0:64]`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from megatron.checkpoint.tensor_file import TensorFile
from megatron.flags import InputError
from megatron.optim.buffer import ParamBuffer
from megatron.optim.layout import Bucket, Entry
from megatron.parallel.slices import Block, GlobalSlice, Range, flat_blocks, overlap

# Name of a whole tensor to its shape, its dtype as safetensors writes it, and its pieces.
Index = dict[str, dict[str, Any]]
# Name of a whole tensor to the pieces of it that go into a file: where the tensor lies, which block of it, its values.
PiecesToWrite = dict[str, list[tuple[GlobalSlice, Block, Tensor]]]


def file_name(kind: str, rank: int, ranks: int) -> str:
    """Of the file in which a rank writes its tensors of the `kind` "model" or "optimizer"."""
    return f"{kind}.safetensors" if ranks == 1 else f"{kind}-{rank + 1:05d}-of-{ranks:05d}.safetensors"


def share_of(bucket: Bucket, buffer: ParamBuffer) -> Range:
    """The part of a bucket that this replica writes: an equal one, which with the distributed optimizer it owns."""
    dp, length = buffer.mesh.dp, bucket.end - bucket.start
    return bucket.start + length * dp.rank // dp.size, bucket.start + length * (dp.rank + 1) // dp.size


def shares(buffer: ParamBuffer, owned: list[Tensor]) -> list[Tensor]:
    """What this process writes of a flat tensor, of which it owns the pieces `owned` by bucket: a view of each."""
    found = []
    for bucket, piece in zip(buffer.buckets, owned, strict=True):
        begin, end = share_of(bucket, buffer)
        found.append(piece[begin - bucket.owned[0] : end - bucket.owned[0]])
    return found


def pieces_to_write(buffer: ParamBuffer, mine: list[Tensor]) -> Iterator[tuple[Entry, Block, Tensor]]:
    """Of the `shares` of a flat tensor: parameter, block of the whole tensor, and its values. No other process writes
    these elements."""
    for bucket, piece in zip(buffer.buckets, mine, strict=True):
        whole_share = share_of(bucket, buffer)
        for entry in bucket.entries:
            share = overlap(whole_share, (entry.start, entry.end))
            if share is None:
                continue
            for here, whole in _blocks(entry, share, buffer):
                begin = entry.start - whole_share[0] + here.rows[0] * entry.place.row + here.columns[0]
                rows, columns = here.shape
                shape = (rows,) if len(entry.place.shape) == 1 else (rows, columns)
                yield entry, whole, piece[begin : begin + rows * columns].view(shape)


def _blocks(entry: Entry, share: Range, buffer: ParamBuffer) -> Iterator[tuple[Block, Block]]:
    """The blocks of the local tensor that make up a range of the flat memory, and theirs of the whole tensor."""
    row = entry.place.row
    for part in flat_blocks(share[0] - entry.start, share[1] - entry.start, row):
        for counted in entry.counted(buffer.mesh.tp):
            for local, whole in entry.place.blocks():
                both = part.meet(Block(counted, (0, row)))
                both = both and both.meet(local)
                if both is not None:
                    yield both, both.moved(local, whole)


def write_pieces(path: Path, pieces: PiecesToWrite) -> None:
    """Write a file of pieces, by the names of whole tensors. Its metadata holds their part of the index.

    Raises:
        OSError: it cannot be written.
    """
    contents: dict[str, Tensor] = {}
    index: Index = {}
    for name, blocks in pieces.items():
        for place, block, values in blocks:
            shape = place.shape if place.real is None else (place.real, *place.shape[1:])
            key = piece_key(name, block, shape)
            contents[key] = values.detach().cpu()
            found = index.setdefault(name, {"shape": shape, "dtype": str(values.dtype)[6:], "pieces": []})
            found["pieces"].append([path.name, key, block.rows, block.columns])
    try:
        safetensors.torch.save_file(contents, path, metadata={"index": json.dumps(index)})
    except safetensors.SafetensorError as error:  # which is how it tells of a full disk
        raise OSError(" ".join(str(error).split())) from None
    path.chmod(0o644)  # safetensors lets nobody else read it


def piece_key(name: str, block: Block, shape: tuple[int, ...]) -> str:
    """A piece's name in its file."""
    if block == Block((0, shape[0]), (0, math.prod(shape[1:]))):
        return name
    ranges = (block.rows,) if len(shape) == 1 else (block.rows, block.columns)
    return f"{name}[{','.join(f'{begin}:{end}' for begin, end in ranges)}]"


def read_index(path: Path) -> Index:
    """The part of the index in a file's metadata."""
    with safetensors.safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["index"])


@dataclasses.dataclass
class Pieces:
    """The tensors of a checkpoint, to read what is wanted of them.

    Raises, as every method:
        InputError: a file is missing or damaged.
    """

    folder: Path
    index: Index

    def __post_init__(self) -> None:
        self.files: dict[str, TensorFile] = {}

    def read(self, name: str, place: GlobalSlice) -> Tensor:
        """The part `place` of a tensor, in fp32; rows that pad the vocabulary are zero."""
        check_shape(self.folder, self.index, name, place)  # before memory is taken
        values = torch.zeros(math.prod(place.local_shape))
        self.read_into(values, name, place, 0)
        return values.view(place.local_shape)

    def read_into(self, target: Tensor, name: str, place: GlobalSlice, begin: int) -> None:
        """Fill `target`, flat, with elements of the part `place` of a tensor, from its element `begin` on."""
        check_shape(self.folder, self.index, name, place)
        rows = place.shape[0] if place.real is None else place.real
        missing = 0
        for part in flat_blocks(begin, begin + target.numel(), place.row):
            for local, whole in place.blocks():
                here = part.meet(local)
                # Rows that pad the vocabulary are in no file.
                wanted = here and here.moved(local, whole).meet(Block((0, rows), (0, 2**62)))
                if not wanted:
                    continue
                missing += math.prod(wanted.shape)
                for file, key, *ranges in self.index[name]["pieces"]:
                    source = Block(*map(tuple, ranges))
                    both = wanted.meet(source)
                    if both is None:
                        continue
                    if file not in self.files:
                        self.files[file] = TensorFile(self.folder / file)
                    at = both.moved(whole, local)
                    start = at.rows[0] * place.row + at.columns[0] - begin + target.storage_offset()
                    self.files[file].read_into(
                        target.as_strided(both.shape, (place.row, 1), start),
                        key,
                        both.moved(source, Block((0, 0), (0, 0))),
                    )
                    missing -= math.prod(both.shape)
        if missing:
            raise InputError(f"{self.folder}: {missing} elements of {name} are in none of the files")


def check_shape(folder: Path, index: Index, name: str, place: GlobalSlice) -> None:
    """Raise `InputError` unless the index of a checkpoint has a tensor that `place` is a part of."""
    if name not in index:
        raise InputError(f"{folder}: lacks the tensor {name}")
    shape = tuple(index[name]["shape"])
    fits = shape[:1] == place.shape[:1] if place.real is None else shape[0] >= place.real
    if not fits or shape[1:] != place.shape[1:]:
        raise InputError(f"{folder}: {name} has shape {shape}, but the model has {place.shape}")
