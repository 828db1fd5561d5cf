"""A safetensors file of a Hugging Face checkpoint, whose folder may be a Git LFS clone."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from megatron.checkpoint.tensor_file import DTYPES, TensorFile
from megatron.errors import InputError
from megatron.parallel.slices import Block


class HubFile(TensorFile):
    """A safetensors file whose tensors are read whole."""

    def __init__(self, path: Path) -> None:
        try:
            super().__init__(path)
        except InputError:
            if _is_pointer(path):
                raise InputError(
                    f"{path}: is a Git LFS pointer, not the file; fetch the file with git lfs pull"
                ) from None
            raise

    def read(self, key: str) -> Tensor:
        """Read a whole tensor in its own dtype."""
        shape, dtype = self._find(key).shape, self._find(key).dtype
        values = torch.empty(shape, dtype=DTYPES[dtype])
        matrix = values.view(shape[0], math.prod(shape[1:]))
        self.read_into(matrix, key, Block((0, matrix.shape[0]), (0, matrix.shape[1])))
        return values


def _is_pointer(path: Path) -> bool:
    """True if a file is a Git LFS pointer."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(23) == b"version https://git-lfs"
