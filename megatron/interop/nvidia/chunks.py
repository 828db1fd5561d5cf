"""Read the tensors of a checkpoint that torch.distributed.checkpoint wrote.

.metadata        a pickle: the shape and the chunks of each tensor, and the file of each chunk
__0_0.distcp     chunks, each as torch.save writes it, one after the other
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.errors import InputError
from megatron.flags import LARGEST
from megatron.interop.torch_file import StoredTensor, read_torch_file
from megatron.interop.unpickle import Record, open_limited, unpickle
from megatron.model.config import ModelConfig

METADATA = ".metadata"
(MAX_LAYERS,) = (f.metadata["flag"].high for f in dataclasses.fields(ModelConfig) if f.name == "num_layers")
STACK = "decoder.layers."
# Kinds of tensors that are not optimizer state in model space.
MODEL, OTHER = "model", "other"


@dataclasses.dataclass(frozen=True)
class StoredChunk:
    """A block of a tensor, and its location in a file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    path: Path
    begin: int
    length: int


@dataclasses.dataclass(frozen=True)
class ChunkedTensor:
    """A tensor, and the blocks of which it consists."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[StoredChunk, ...]

    def read(self, index: tuple[int, ...] = ()) -> Tensor:
        """Read the tensor, or what is at `index` of its first dimensions.

        Raises:
            InputError: a file is damaged, or chunks are missing or overlap.
        """
        stacked = len(index)
        values = torch.empty(self.shape[stacked:], dtype=self.dtype)
        missing = torch.ones(values.shape, dtype=torch.bool)
        for chunk in self.chunks:
            ends = [offset + size for offset, size in zip(chunk.offsets, chunk.sizes, strict=True)]
            ranges = zip(chunk.offsets, index, ends, strict=False)  # `index` is shorter
            if not all(begin <= i < end for begin, i, end in ranges):
                continue
            stored = read_torch_file(chunk.path, chunk.begin, chunk.length)
            if not isinstance(stored, StoredTensor) or (stored.shape, stored.dtype) != (
                chunk.sizes,
                self.dtype,
            ):
                raise InputError(f"{chunk.path}: a chunk of {self.name} contradicts {METADATA}")
            for i, offset in zip(index, chunk.offsets, strict=False):
                stored = stored.row(i - offset)
            block = tuple(slice(*ends) for ends in zip(chunk.offsets, ends, strict=True))[stacked:]
            if not missing[block].all():
                raise InputError(f"{chunk.path}: a chunk of {self.name} overlaps another")
            values[block] = stored.read()
            missing[block] = False
        if missing.any():
            raise InputError(
                f"{self.chunks[0].path.parent}: {missing.sum()} elements of {self.name} are in no file"
            )
        return values


@dataclasses.dataclass(frozen=True)
class LayerTensor:
    """A tensor, or one of the layers or experts that it stacks, at `index` of the first dimensions."""

    whole: ChunkedTensor
    index: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return self.whole.shape[len(self.index) :]

    @property
    def dtype(self) -> torch.dtype:
        return self.whole.dtype

    def read(self) -> Tensor:
        """Read the values.

        Raises:
            InputError: a file is damaged, or chunks are missing or overlap.
        """
        return self.whole.read(self.index)

    @property
    def parts(self) -> tuple[Callable[[], Tensor], ...]:
        """As `ExternalTensor.parts`."""
        return (self.read,)

    def at(self, i: int) -> LayerTensor:
        """The tensor at `i` of the first dimension."""
        return LayerTensor(self.whole, (*self.index, i))


def read_metadata(folder: Path) -> tuple[dict[str, ChunkedTensor], dict[str, StoredChunk]]:
    """Read the tensors of a checkpoint, by name, and the chunks of its other objects.

    Raises:
        InputError: `.metadata` is damaged, or names files outside the folder.
    """
    path = folder / METADATA

    def refuse(*_: Any) -> None:
        raise ValueError("it contains a tensor")

    try:
        with open_limited(path) as file:
            whole = unpickle(file, str(path), tensor=refuse, storage=refuse)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    try:
        stored = {_chunk_key(index): info for index, info in whole.get("storage_data").items()}
        tensors, objects = {}, {}
        for name, entry in whole.get("state_dict_metadata").items():
            if type(name) is not str:
                raise ValueError("the name of a tensor is not a string")
            if entry.kind.endswith(".BytesStorageMetadata"):
                objects[name] = _chunk(folder, (), (), stored[name, None])
                continue
            shape, (dtype, *_) = _numbers(entry.get("size")), entry.get("properties").state
            chunks = [(_numbers(c.get("offsets")), _numbers(c.get("sizes"))) for c in entry.get("chunks")]
            if is_stacked(kind_of(name)[1]) and (not shape or 0 in shape or shape[0] > MAX_LAYERS):
                raise ValueError(f"{name[:80]} stacks all layers, but has the shape {shape}")
            for offsets, sizes in chunks:
                if any(o + n > total for o, n, total in zip(offsets, sizes, shape, strict=True)):
                    raise ValueError(f"a chunk of {name} is out of its range")
            found = tuple(_chunk(folder, o, n, stored[name, o]) for o, n in chunks)
            if sum(chunk.length for chunk in found) < math.prod(shape) * dtype.itemsize:
                raise ValueError(f"the chunks of {name} are too small for {shape}")
            tensors[name] = ChunkedTensor(name, shape, dtype, found)
        _check_lengths([chunk for tensor in tensors.values() for chunk in tensor.chunks])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}: is damaged ({' '.join(str(error).split())[:200]})") from None
    return tensors, objects


def _check_lengths(chunks: list[StoredChunk]) -> None:
    """Raise `ValueError` if chunks are longer than their file, so that reading them would exhaust memory."""
    lengths: dict[Path, int] = {}
    for chunk in chunks:
        lengths[chunk.path] = lengths.get(chunk.path, 0) + chunk.length
    for path, length in lengths.items():
        if length > path.stat().st_size:
            raise ValueError(f"the chunks in {path.name} overlap")


def _chunk_key(index: Record) -> tuple[str, tuple[int, ...] | None]:
    """The name and offset of a chunk. They are checked first, because hashing arbitrary objects can crash Python."""
    name, offset = index.get("fqn"), index.get("offset")
    if type(name) is not str:
        raise ValueError("the name of a chunk is not a string")
    return name, None if offset is None else _numbers(offset)


def _numbers(values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple) or any(type(n) is not int or not 0 <= n <= LARGEST for n in values):
        raise ValueError("a shape or an offset is invalid")
    return values


def _chunk(folder: Path, offsets: tuple[int, ...], sizes: tuple[int, ...], info: Record) -> StoredChunk:
    name, begin, length = (info.get(key) for key in ("relative_path", "offset", "length"))
    if not re.fullmatch(r"__[0-9]+_[0-9]+\.distcp", name):
        raise ValueError(f"{name[:80]!r} is not the name of a chunk file")
    if info.get("transform_descriptors"):
        raise ValueError("chunks are compressed or encrypted")
    path = folder / name
    if not path.is_file() or begin + length > path.stat().st_size:
        raise InputError(f"{path}: is missing or too short; the checkpoint is incomplete")
    return StoredChunk(offsets, sizes, path, *_numbers((begin, length)))


def kind_of(name: str) -> tuple[str, str]:
    """The kind of a tensor and the name of its weight: `MODEL` for a weight, `OTHER` for state not in model space."""
    found = re.fullmatch(r"optimizer\.state\.([a-z0-9_]+)\.(.+)", name)
    if found:
        return found[1], found[2]
    return (OTHER if re.match(r"(chained_[0-9]+\.)?optimizer\.", name) else MODEL), name


def is_stacked(weight: str) -> bool:
    """True if a tensor that belongs to this weight stacks all layers."""
    return weight.startswith(STACK) and not re.match(r"[0-9]", weight[len(STACK) :])
