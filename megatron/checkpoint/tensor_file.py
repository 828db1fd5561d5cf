"""Reads blocks of the tensors in a safetensors file, without mapping it into memory.

What has been read of a map counts as memory of the process until the map is gone: loading would take twice the memory
of what is loaded. Without a map safetensors itself reads whole tensors, of which a process may need a small part.
"""

from __future__ import annotations

import math
from pathlib import Path

import safetensors
import torch
from torch import Tensor

from megatron.flags import InputError
from megatron.parallel.slices import Block

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}
# Bytes that are read before they are put where they belong.
AT_ONCE = 1 << 22


class TensorFile:
    """A safetensors file of vectors and matrices; it is open only while it is read.

    Raises, as every method:
        InputError: the file is missing or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # safetensors checks the header, and that the tensors lie one after the other without gaps.
            with safetensors.safe_open(path, framework="pt") as opened:
                slices = [(key, opened.get_slice(key)) for key in opened.offset_keys()]
                found = [(key, part.get_dtype(), part.get_shape()) for key, part in slices]
            with path.open("rb") as file:
                begin = 8 + int.from_bytes(file.read(8), "little")
        except FileNotFoundError:
            raise InputError(f"{path}: is missing; the checkpoint is not whole") from None
        except (safetensors.SafetensorError, OSError) as error:
            raise InputError(f"{path}: cannot be read ({' '.join(str(error).split())[:200]})") from None
        # Of every tensor: where it begins, its dtype, and its rows and columns.
        self.tensors: dict[str, tuple[int, torch.dtype, int, int]] = {}
        for key, name, shape in found:
            if name not in DTYPES or not shape:
                raise InputError(f"{path}: {key} cannot be read (dtype {name}, shape {shape})")
            self.tensors[key] = (begin, DTYPES[name], shape[0], math.prod(shape[1:]))
            begin += math.prod(shape) * DTYPES[name].itemsize

    def read_into(self, target: Tensor, key: str, block: Block) -> None:
        """Fill `target`, [rows, columns] of `block`, with that block of a tensor."""
        if key not in self.tensors:
            raise InputError(f"{self.path}: {key} cannot be read (the file has no such tensor)")
        begin, dtype, rows, columns = self.tensors[key]
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
                        file.seek(begin + ((row + i) * columns + left) * dtype.itemsize)
                        if file.readinto(line) != len(line):
                            raise InputError(f"{self.path}: ends before {key} does; it is torn")
                    target[row - top : row - top + len(part)].copy_(part)
        except OSError as error:
            raise InputError(f"{self.path}: cannot be read ({error.strerror})") from None
