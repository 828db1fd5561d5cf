"""Write a safetensors file one tensor at a time. The safetensors library needs all tensors in memory."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from megatron.checkpoint.tensor_file import DTYPES

NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclasses.dataclass(frozen=True)
class TensorToWrite:
    """A tensor that is computed when it is written."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensors(path: Path, tensors: Mapping[str, TensorToWrite], advance: Callable[[int], object]) -> None:
    """Write a safetensors file with one tensor in memory at a time; `advance` receives the bytes of each.

    Raises:
        OSError: the file cannot be written.
    """
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        offsets = [end, end := end + tensor.nbytes]
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # aligns the tensors
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            values = tensor.make()
            assert values.shape == tensor.shape and values.dtype == tensor.dtype
            file.write(values.contiguous().view(-1).view(torch.uint8).numpy().data)
            advance(tensor.nbytes)


def in_shards(tensors: Mapping[str, TensorToWrite], largest: int) -> Iterable[dict[str, TensorToWrite]]:
    """Divide tensors, in order, into groups of at most `largest` bytes; a larger tensor is a group of its own."""
    shard: dict[str, TensorToWrite] = {}
    size = 0
    for name, tensor in tensors.items():
        if shard and size + tensor.nbytes > largest:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    if shard:
        yield shard
