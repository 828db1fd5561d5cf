"""Read files of torch.save, in either of its formats, without running code from them.

    zip      NAME/data.pkl, the pickle; NAME/data/0, NAME/data/1, ..., the uncompressed storages (torch >= 1.6)
    stream   pickles of a magic number, a version, the machine, the object and the keys of its storages; then, for each
             storage, the number of elements and the bytes

Tensors are read from the file on demand.
"""

from __future__ import annotations

import dataclasses
import io
import math
import struct
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.errors import InputError
from megatron.flags import LARGEST
from megatron.interop.unpickle import LimitedReader, open_limited, shown_value, unpickle

MAGIC, VERSION = 0x1950A86A20F9469CFC6C, 1001
MAX_DIMENSIONS = 8


@dataclasses.dataclass(eq=False)
class Storage:
    """Contiguous elements in a file, starting at byte `begin`."""

    path: Path
    dtype: torch.dtype
    elements: int
    begin: int | None = None  # until it is located


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file; its first element is element `offset` of the storage."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.storage.dtype

    def row(self, i: int) -> StoredTensor:
        """Row `i` of the first dimension, not read yet."""
        return StoredTensor(self.storage, self.offset + i * self.stride[0], self.shape[1:], self.stride[1:])

    def read(self) -> Tensor:
        """Read the values.

        Raises:
            InputError: the file cannot be read.
        """
        assert self.storage.begin is not None
        values = torch.empty(_span(self.shape, self.stride), dtype=self.dtype)
        path = self.storage.path
        try:
            with path.open("rb") as file:
                file.seek(self.storage.begin + self.offset * self.dtype.itemsize)
                if file.readinto(values.view(torch.uint8).numpy().data) != values.nbytes:
                    raise InputError(f"{path}: ends within a tensor; it is truncated")
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror})") from None
        return values.as_strided(self.shape, self.stride)


def _span(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """The number of storage elements from a tensor's first to its last, inclusive."""
    return 0 if 0 in shape else 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))


class _Window(io.RawIOBase):
    """A file-like view of `length` bytes of a file, starting at byte `begin`."""

    def __init__(self, file: io.BufferedReader, begin: int, length: int) -> None:
        self.file, self.begin, self.length, self.position = file, begin, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.length}[whence]
        if position < 0:
            raise ValueError("a negative position in a file")
        self.position = position
        return position

    def readinto(self, buffer: Any) -> int:
        self.file.seek(self.begin + self.position)
        count = self.file.readinto(memoryview(buffer)[: max(0, self.length - self.position)])
        self.position += count
        return count


def read_torch_file(path: Path, begin: int = 0, length: int | None = None) -> Any:
    """Read the object in a file of torch.save, or in `length` bytes of a file, starting at byte `begin`.

    Dicts of any class become plain dicts, tensors `StoredTensor`s, other objects `Record`s.

    Raises:
        InputError: the file is missing or damaged, or holds objects that no checkpoint needs.
    """
    if not path.is_file():  # a pipe may never end
        raise InputError(f"{path}: is missing, or not a file")
    try:
        with open_limited(path) as file:
            if length is not None:
                return _read(path, LimitedReader(_Window(file, begin, length)), begin)
            return _read(path, file, 0)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None


def _read(path: Path, file: io.BufferedReader, begin: int) -> Any:
    """Read the object in `file`, whose first byte is byte `begin` of the file on disk."""
    if file.read(4) != b"PK\3\4":
        file.seek(0)
        return _read_stream(path, file, begin)
    try:
        with zipfile.ZipFile(file) as archive:
            return _read_zip(path, file, archive, begin)
    except InputError:
        raise
    except (zipfile.BadZipFile, RuntimeError, EOFError, ValueError, struct.error) as error:
        raise InputError(f"{path}: is damaged, or not a file of torch.save ({str(error)[:200]})") from None


def _read_zip(path: Path, file: io.BufferedReader, archive: zipfile.ZipFile, begin: int) -> Any:
    entries = {info.filename: info for info in archive.infolist()}
    pickles = [name for name in entries if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise InputError(
            f"{path}: is a zip archive, but not one of torch.save; if it contains model_optim_rng.pt, unzip it and "
            "give the folder"
        )
    (name,) = pickles
    prefix = name.removesuffix("data.pkl")
    if any(info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 for info in entries.values()):
        raise InputError(f"{path}: is compressed or encrypted, which files of torch.save never are")
    if f"{prefix}byteorder" in entries and archive.read(f"{prefix}byteorder") != b"little":
        raise InputError(
            f"{path}: was written on a big-endian machine; load and save it on a little-endian one"
        )
    storages: dict[str, Storage] = {}

    def storage(identity: Any) -> Storage:
        found = _describe(path, identity, storages)
        if found.begin is None:
            info = entries[f"{prefix}data/{identity[2]}"]
            content, length = _content(file, info), found.elements * found.dtype.itemsize
            if info.file_size != length or content + length > file.seek(0, io.SEEK_END):
                raise ValueError(f"storage {identity[2]} has the wrong length")
            found.begin = begin + content
        return found

    return unpickle(io.BytesIO(archive.read(name)), str(path), tensor=_tensor, storage=storage)


def _content(file: io.BufferedReader, info: zipfile.ZipInfo) -> int:
    """The position of an entry's content: after its local header, which has two fields of variable length."""
    file.seek(info.header_offset)
    header = file.read(30)
    if header[:4] != b"PK\3\4":
        raise ValueError(f"{info.filename} is not where the zip directory says")
    lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    return info.header_offset + 30 + lengths


def _read_stream(path: Path, file: io.BufferedReader, begin: int) -> Any:
    storages: dict[str, Storage] = {}

    def following() -> Any:
        return unpickle(file, str(path), tensor=_tensor, storage=lambda name: _describe(path, name, storages))

    if file.read(2) != b"\x80\x02":
        raise InputError(f"{path}: is damaged, or not a file of torch.save")
    file.seek(0)
    if following() != MAGIC or following() != VERSION:
        raise InputError(f"{path}: is a pickle, but not one of torch.save")
    machine = following()
    if not isinstance(machine, dict) or machine.get("little_endian") is not True:
        raise InputError(
            f"{path}: was written on a big-endian machine; load and save it on a little-endian one"
        )
    whole, names = following(), following()
    end = file.seek(0, io.SEEK_CUR)
    size = file.seek(0, io.SEEK_END)
    if not isinstance(names, list) or len(names) != len(storages):
        raise InputError(f"{path}: is damaged (its list of storages is wrong)")
    for name in names:
        found = storages.get(name) if type(name) is str else None
        if found is None or found.begin is not None:
            raise InputError(f"{path}: is damaged (its list of storages is wrong)")
        file.seek(end)
        length = found.elements * found.dtype.itemsize
        if int.from_bytes(file.read(8), "little") != found.elements or end + 8 + length > size:
            raise InputError(
                f"{path}: ends within its tensors, or their lengths are wrong; it is truncated or damaged"
            )
        found.begin = begin + end + 8
        end += 8 + length
    return whole


def _describe(path: Path, identity: Any, storages: dict[str, Storage]) -> Storage:
    """The storage that a pickle names: ("storage", dtype, key, device, elements), in old files followed by None."""
    kind, dtype, key, _, elements, *rest = identity
    if kind != "storage" or type(key) is not str or not isinstance(dtype, torch.dtype) or any(rest):
        raise ValueError("the description of a storage is not one of torch.save")
    if type(elements) is not int or not 0 <= elements <= LARGEST:
        raise ValueError(f"storage {key[:20]} has {shown_value(elements)} elements")
    found = storages.setdefault(key, Storage(path, dtype, elements))
    if (found.dtype, found.elements) != (dtype, elements):
        raise ValueError(f"storage {key[:20]} is described twice, differently")
    return found


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, *rest: Any) -> StoredTensor:
    shape, stride = tuple(shape), tuple(stride)
    wrong = any(type(n) is not int or not 0 <= n <= LARGEST for n in (offset, *shape, *stride))
    if wrong or len(shape) != len(stride) or len(shape) > MAX_DIMENSIONS or not isinstance(storage, Storage):
        raise ValueError("the description of a tensor is not one of torch.save")
    # A tensor with overlapping strides could be far larger than its storage.
    largest = max(offset + _span(shape, stride), math.prod(shape))
    if largest > storage.elements:
        raise ValueError(f"a tensor {shape} reaches beyond its storage of {storage.elements} elements")
    return StoredTensor(storage, offset, shape, stride)
