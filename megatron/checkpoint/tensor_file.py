"""Read blocks of tensors from a safetensors file without mapping it.

The safetensors library maps files, and the pages that are read count as memory of the process until the file is closed:
loading would take twice the memory.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import safetensors
import torch
from torch import Tensor

from megatron.errors import InputError
from megatron.parallel.slices import Block

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# Bytes read into a buffer at a time.
READ_CHUNK_BYTES = 1 << 22


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """A tensor in a safetensors file: its first byte, its dtype as safetensors spells it, and its shape."""

    begin: int
    dtype: str
    shape: tuple[int, ...]


class TensorFile:
    """A safetensors file, open only while a method reads it.

    Every method raises `InputError` if the file is missing or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # safetensors checks the header, and that the tensors are contiguous.
            with safetensors.safe_open(path, framework="pt"):
                pass
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length))
        except FileNotFoundError:
            raise InputError(f"{path}: is missing; the checkpoint is incomplete") from None
        except (safetensors.SafetensorError, OSError) as error:
            raise InputError(f"{path}: cannot be read ({' '.join(str(error).split())[:200]})") from None
        self.metadata = header.pop("__metadata__", {})
        self.tensors = {
            key: TensorInfo(8 + length + tensor["data_offsets"][0], tensor["dtype"], tuple(tensor["shape"]))
            for key, tensor in header.items()
        }

    def read_into(self, target: Tensor, key: str, block: Block) -> None:
        """Fill `target`, [rows, columns], with a block of a tensor viewed as a matrix."""
        stored = self._find(key)
        dtype, rows, columns = DTYPES[stored.dtype], stored.shape[0], math.prod(stored.shape[1:])
        (top, bottom), (left, right) = block.rows, block.columns
        if bottom > rows or right > columns:
            raise InputError(f"{self.path}: {key} is smaller than in the index")
        chunk = min(max(1, READ_CHUNK_BYTES // ((right - left) * dtype.itemsize)), bottom - top)
        values = torch.empty(chunk, right - left, dtype=dtype)
        try:
            with self.path.open("rb") as file:
                for row in range(top, bottom, chunk):
                    part = values[: bottom - row]
                    # Whole rows are contiguous in the file.
                    lines = part.view(1, -1) if right - left == columns else part
                    for i, line in enumerate(lines.view(torch.uint8).numpy()):
                        file.seek(stored.begin + ((row + i) * columns + left) * dtype.itemsize)
                        if file.readinto(line) != len(line):
                            raise InputError(f"{self.path}: ends within {key}; it is truncated")
                    target[row - top : row - top + len(part)].copy_(part)
        except OSError as error:
            raise InputError(f"{self.path}: cannot be read ({error.strerror})") from None

    def _find(self, key: str) -> TensorInfo:
        if key not in self.tensors:
            raise InputError(f"{self.path}: {key} cannot be read (the file has no such tensor)")
        stored = self.tensors[key]
        if stored.dtype not in DTYPES or 0 in stored.shape or not stored.shape:
            raise InputError(
                f"{self.path}: {key} cannot be read (dtype {stored.dtype}, shape {list(stored.shape)})"
            )
        return stored
