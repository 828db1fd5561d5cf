"""The manifest of a checkpoint, index.json: the size and checksum of every file, and the location of each tensor."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

from megatron.checkpoint.pieces import Index
from megatron.checkpoint.storage import check_is_file, read_digests
from megatron.errors import InputError
from megatron.files import read_file
from megatron.flags import LARGEST

NAME = "index.json"
MAX_BYTES = 1 << 30
# Files of tensors are in the folder itself.
TENSORS = re.compile(r"(model|optimizer)(-[0-9]{5,}-of-[0-9]{5,})?\.safetensors")
FILE = re.compile(rf"{TENSORS.pattern}|state\.json|tokenizer/[^/\0]+")


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The content of index.json.

    Attributes:
        files: size in bytes and SHA-256 of the segments of every other file, by its path relative to the folder. One
            digest is of the whole file.
        tensors: an index for each kind of tensors, "model" and, if it was saved, "optimizer".
    """

    folder: Path
    files: dict[str, tuple[int, list[str]]]
    tensors: dict[str, Index]

    def write(self) -> None:
        """Write index.json."""
        content = json.dumps({"files": self.files, "tensors": self.tensors})
        text = f'{{"sha256": "{hashlib.sha256(content.encode()).hexdigest()}",\n"content": {content}}}\n'
        (self.folder / NAME).write_text(text, encoding="utf-8")

    def check_sizes(self) -> None:
        """Raise `InputError` unless every file exists and has its recorded size."""
        for name, (size, _) in self.files.items():
            path = self.folder / name
            check_is_file(path)
            if not path.is_file():
                raise InputError(f"{path}: is missing; the checkpoint is incomplete")
            if path.stat().st_size != size:
                raise InputError(
                    f"{path}: has {path.stat().st_size} bytes, but {size} were written; it is truncated"
                )

    def verify(self, names: list[str]) -> None:
        """Raise `InputError` unless these files have their recorded checksums."""
        for name in names:
            digests = self.files[name][1]
            try:
                found = read_digests(self.folder / name, whole=len(digests) == 1)
            except OSError as error:
                raise InputError(f"{self.folder / name}: cannot be read ({error.strerror})") from None
            if found != digests:
                raise InputError(f"{self.folder / name}: is damaged (its checksum differs)")


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a checkpoint.

    Raises:
        InputError: it is missing or damaged.
    """
    path = folder / NAME
    check_is_file(path)
    try:
        text = read_file(path, MAX_BYTES).decode("utf-8")
        whole = json.loads(text)
        content = text[text.index('"content": ') + len('"content": ') : text.rindex("}")]
        if hashlib.sha256(content.encode()).hexdigest() != whole["sha256"]:
            raise ValueError("its checksum differs")
        files, tensors = whole["content"]["files"], whole["content"]["tensors"]
        for entry in (e for e in files.values() if type(e[1]) is str):  # written by an earlier version
            entry[1] = [entry[1]]
        _check(files, tensors)
    except FileNotFoundError:
        raise InputError(
            f"{path}: is missing; the folder is not a complete checkpoint of this program"
        ) from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{path}: is damaged ({' '.join(str(error).split())[:200]})") from None
    return Manifest(folder, {name: tuple(entry) for name, entry in files.items()}, tensors)


def _check(files: Any, tensors: Any) -> None:
    """Check a manifest that may be malicious; raises `ValueError`, `TypeError` or another error if it is wrong."""
    for name, (size, digests) in files.items():
        if not FILE.fullmatch(name) or ".." in name:
            raise ValueError(f"{name[:80]!r} is not the name of a checkpoint's file")
        if type(size) is not int or type(digests) is not list:
            raise ValueError(f"size or checksum of {name} is wrong")
    for kind, index in tensors.items():
        for name, tensor in index.items():
            blocks = []
            for file, key, (top, bottom), (left, right) in tensor["pieces"]:
                known = file in files and TENSORS.fullmatch(file) and file.startswith(kind)
                if not known or type(key) is not str:
                    raise ValueError(f"{name[:80]} is in the unknown file {file[:80]!r}")
                blocks.append((top, bottom, left, right))
            numbers = [*tensor["shape"], *itertools.chain.from_iterable(blocks)]
            if any(type(n) is not int or not 0 <= n <= LARGEST for n in numbers) or len(tensor["shape"]) > 8:
                raise ValueError(f"the shape or a piece of {name[:80]} is wrong")
            if not _is_exact_cover(tensor["shape"], blocks):
                raise ValueError(f"the pieces of {name[:80]} overlap or leave elements out")


def _is_exact_cover(shape: list[int], blocks: list[tuple[int, int, int, int]]) -> bool:
    """True if every element of a tensor, viewed as a matrix, is in exactly one of the blocks.

    A corner at which an even number of blocks meet cancels out. If only the matrix's own corners are left, every
    element of it is in an odd number of blocks, which is one if the areas sum to its area.
    """
    rows, columns = shape[0], math.prod(shape[1:])
    area, corners = rows * columns, {(0, 0), (0, columns), (rows, 0), (rows, columns)}
    for top, bottom, left, right in blocks:
        if top >= bottom or left >= right:
            return False
        area -= (bottom - top) * (right - left)
        corners ^= {(top, left), (top, right), (bottom, left), (bottom, right)}
    return area == 0 and not corners
