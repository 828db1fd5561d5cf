"""A safetensors file of a Hugging Face checkpoint, whose folder may be a Git LFS clone."""

from __future__ import annotations

import dataclasses
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

    def contents(self) -> dict[str, HubTensor]:
        """The tensors of the file, by name."""
        return {key: HubTensor(self, key, info.shape) for key, info in self.tensors.items()}

    def read(self, key: str, block: Block) -> Tensor:
        """Read a block of a tensor viewed as a matrix, in its own dtype."""
        values = torch.empty(block.shape, dtype=DTYPES[self._find(key).dtype])
        self.read_into(values, key, block)
        return values


@dataclasses.dataclass(frozen=True)
class HubTensor:
    """A tensor in a file, or one that is a block of a larger one.

    Attributes:
        key: the name of the stored tensor.
        block: of the stored tensor viewed as a matrix; None for all of it.
    """

    file: HubFile
    key: str
    shape: tuple[int, ...]
    block: Block | None = None

    @property
    def dtype(self) -> str:
        """As safetensors spells it."""
        return self.file.tensors[self.key].dtype

    def read(self) -> Tensor:
        """Read the values in their own dtype.

        Raises:
            InputError: the file is damaged, or the dtype is not supported.
        """
        rows = self.shape[0] if self.shape else 0
        block = self.block or Block((0, rows), (0, math.prod(self.shape[1:])))
        return self.file.read(self.key, block).view(self.shape)


def _is_pointer(path: Path) -> bool:
    """True if a file is a Git LFS pointer."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(23) == b"version https://git-lfs"
