"""Reads blocks of the tensors in a safetensors file without mapping it into memory, and writes such a file tensor by
tensor.

What has been read of a map counts as memory of the process until the map is gone: loading would take twice the memory
of what is loaded. Without a map safetensors itself reads whole tensors, of which a process may need a small part; and
it writes only what is all in memory.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import safetensors
import torch
from torch import Tensor

from megatron.flags import InputError
from megatron.parallel.slices import Block

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
# Bytes that are read before they are put where they belong.
AT_ONCE = 1 << 22


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor in a file: where it begins, its dtype as safetensors writes it, and its shape."""

    begin: int
    dtype: str
    shape: tuple[int, ...]


class TensorFile:
    """A safetensors file; it is open only while it is read.

    Raises, as every method:
        InputError: the file is missing or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # safetensors checks the header, and that the tensors lie one after the other without gaps.
            with safetensors.safe_open(path, framework="pt"):
                pass
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length))
        except FileNotFoundError:
            raise InputError(f"{path}: is missing; the checkpoint is not whole") from None
        except (safetensors.SafetensorError, OSError) as error:
            if _is_pointer(path):
                raise InputError(
                    f"{path}: is a pointer of Git LFS in place of the file; fetch it with git lfs pull"
                ) from None
            raise InputError(f"{path}: cannot be read ({' '.join(str(error).split())[:200]})") from None
        header.pop("__metadata__", None)
        self.tensors = {
            key: Stored(8 + length + tensor["data_offsets"][0], tensor["dtype"], tuple(tensor["shape"]))
            for key, tensor in header.items()
        }

    def read(self, key: str) -> Tensor:
        """A whole tensor, in its own dtype."""
        shape, dtype = self._find(key).shape, self._find(key).dtype
        values = torch.empty(shape, dtype=DTYPES[dtype])
        matrix = values.view(shape[0], math.prod(shape[1:]))
        self.read_into(matrix, key, Block((0, matrix.shape[0]), (0, matrix.shape[1])))
        return values

    def read_into(self, target: Tensor, key: str, block: Block) -> None:
        """Fill `target`, [rows, columns] of `block`, with that block of a tensor seen as a matrix."""
        stored = self._find(key)
        dtype, rows, columns = DTYPES[stored.dtype], stored.shape[0], math.prod(stored.shape[1:])
        (top, bottom), (left, right) = block.rows, block.columns
        if bottom > rows or right > columns:
            raise InputError(f"{self.path}: {key} is smaller than the index says")
        at_once = min(max(1, AT_ONCE // ((right - left) * dtype.itemsize)), bottom - top)
        values = torch.empty(at_once, right - left, dtype=dtype)
        try:
            with self.path.open("rb") as file:
                for row in range(top, bottom, at_once):
                    part = values[: bottom - row]
                    # Whole rows lie together in the file.
                    lines = part.view(1, -1) if right - left == columns else part
                    for i, line in enumerate(lines.view(torch.uint8).numpy()):
                        file.seek(stored.begin + ((row + i) * columns + left) * dtype.itemsize)
                        if file.readinto(line) != len(line):
                            raise InputError(f"{self.path}: ends before {key} does; it is torn")
                    target[row - top : row - top + len(part)].copy_(part)
        except OSError as error:
            raise InputError(f"{self.path}: cannot be read ({error.strerror})") from None

    def _find(self, key: str) -> Stored:
        if key not in self.tensors:
            raise InputError(f"{self.path}: {key} cannot be read (the file has no such tensor)")
        stored = self.tensors[key]
        if stored.dtype not in DTYPES or 0 in stored.shape or not stored.shape:
            raise InputError(
                f"{self.path}: {key} cannot be read (dtype {stored.dtype}, shape {list(stored.shape)})"
            )
        return stored


@dataclasses.dataclass(frozen=True)
class ToWrite:
    """A tensor that is made when its turn comes to be written."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensors(path: Path, tensors: Mapping[str, ToWrite], advance: Callable[[int], object]) -> None:
    """Write a safetensors file with one tensor in memory at a time; `advance` is told the bytes of each.

    Raises:
        OSError: it cannot be written.
    """
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        offsets = [end, end := end + tensor.nbytes]
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that the numbers begin at a multiple of their size
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            values = tensor.make()
            assert values.shape == tensor.shape and values.dtype == tensor.dtype
            file.write(values.contiguous().view(-1).view(torch.uint8).numpy())
            advance(tensor.nbytes)


def in_shards(tensors: Mapping[str, ToWrite], largest: int) -> Iterable[dict[str, ToWrite]]:
    """The tensors in their order, in groups of at most `largest` bytes, or of one tensor that is larger."""
    shard: dict[str, ToWrite] = {}
    size = 0
    for name, tensor in tensors.items():
        if shard and size + tensor.nbytes > largest:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    if shard:
        yield shard


def _is_pointer(path: Path) -> bool:
    """Whether a file only says where Git LFS has its content."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(23) == b"version https://git-lfs"
