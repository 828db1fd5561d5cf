"""Tensors in safetensors files, each process's part of the model in a file of its own.

A file's metadata tells of every tensor in it which part of the whole one it is. What loads them reads from all files
the parts that it needs, so a checkpoint can be loaded in another layout than it was saved in.
"""

from __future__ import annotations

import json
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from megatron.checkpoint.storage import sync
from megatron.flags import InputError
from megatron.parallel.slices import GlobalSlice, overlap


def file_name(kind: str, number: int, files: int) -> str:
    """Of the file `number`, from 0 on, of `files` that hold tensors of a kind."""
    return f"{kind}.safetensors" if files == 1 else f"{kind}-{number + 1:05d}-of-{files:05d}.safetensors"


def write_pieces(path: Path, tensors: dict[str, tuple[GlobalSlice, Tensor]]) -> None:
    """Write tensors with what part of the whole each is."""
    places = {
        name: {"shape": place.shape, "dim": place.dim, "ranges": place.ranges}
        for name, (place, _) in tensors.items()
    }
    contents = {name: tensor.contiguous() for name, (_, tensor) in tensors.items()}
    safetensors.torch.save_file(contents, path, metadata={"pieces": json.dumps(places)})
    sync(path)


class Pieces:
    """The tensors of a kind in a checkpoint, whole to who reads them."""

    def __init__(self, folder: Path, kind: str, files: int) -> None:
        """Opens the files. A file without metadata holds whole tensors.

        Raises:
            InputError: a file is missing or damaged.
        """
        self.folder, self.kind = folder, kind
        self.pieces: dict[str, list[tuple[Path, GlobalSlice]]] = {}
        self.handles = {}
        for number in range(files):
            path = folder / file_name(kind, number, files)
            try:
                self.handles[path] = handle = safetensors.safe_open(path, framework="pt")
                saved = json.loads((handle.metadata() or {}).get("pieces", "{}"))
                for name in handle.keys():  # noqa: SIM118, it is no dict
                    place = _place(saved.get(name), tuple(handle.get_slice(name).get_shape()))
                    self.pieces.setdefault(name, []).append((path, place))
            except FileNotFoundError:
                raise InputError(f"{path}: is missing; the checkpoint is not whole") from None
            except (
                safetensors.SafetensorError,
                OSError,
                ValueError,
                TypeError,
                KeyError,
                AttributeError,
            ) as error:
                raise InputError(f"{path}: cannot be read ({' '.join(str(error).split())[:200]})") from None

    def __contains__(self, name: str) -> bool:
        return name in self.pieces

    def read(self, name: str, place: GlobalSlice) -> Tensor:
        """The part `place` of a tensor; rows that pad the vocabulary are zero.

        Raises:
            InputError: the files do not hold all of it, or the tensor has another shape.
        """
        where = f"{self.folder / self.kind}*.safetensors: {name}"
        pieces = self.pieces.get(name)
        if pieces is None:
            raise InputError(f"{where} is missing")
        limit = place.shape[place.dim] if place.real is None else place.real
        missing = sum(max(0, min(end, limit) - begin) for begin, end in place.ranges)
        out: Tensor | None = None
        for path, piece in pieces:
            if piece.local_shape == piece.shape and len(piece.shape) == len(place.shape):
                piece = GlobalSlice(
                    piece.shape, place.dim, ((0, piece.shape[place.dim]),)
                )  # whole, either way
            rows_fit = piece.shape[:1] == place.shape[:1] if place.real is None else piece.shape[0] >= limit
            if not rows_fit or piece.shape[1:] != place.shape[1:] or piece.dim != place.dim:
                raise InputError(f"{where} has shape {piece.shape}, but the model has {place.shape}")
            for begin, mine in place.segments():
                for start, theirs in piece.segments():
                    both = overlap((mine[0], min(mine[1], limit)), theirs)
                    if both is None:
                        continue
                    values = self._slice(
                        path, name, place.dim, both[0] - theirs[0] + start, both[1] - both[0]
                    )
                    if out is None:
                        out = torch.zeros(place.local_shape, dtype=values.dtype)
                    out.narrow(place.dim, begin + both[0] - mine[0], both[1] - both[0]).copy_(values)
                    missing -= both[1] - both[0]
        if missing > 0:
            raise InputError(f"{where} is not whole: {missing} of its rows are in none of the files")
        return torch.zeros(place.local_shape) if out is None else out

    def _slice(self, path: Path, name: str, dim: int, begin: int, length: int) -> Tensor:
        slices = (slice(None),) * dim + (slice(begin, begin + length),)
        try:
            return self.handles[path].get_slice(name)[slices]
        except (safetensors.SafetensorError, OSError, ValueError) as error:
            raise InputError(f"{path}: {name} cannot be read ({error})") from None


def _place(saved: dict | None, shape: tuple[int, ...]) -> GlobalSlice:
    if saved is None:
        return GlobalSlice(shape, 0, ((0, shape[0] if shape else 0),))
    ranges = tuple((int(begin), int(end)) for begin, end in saved["ranges"])
    place = GlobalSlice(tuple(map(int, saved["shape"])), int(saved["dim"]), ranges)
    if place.local_shape != shape or any(not 0 <= b < e <= place.shape[place.dim] for b, e in ranges):
        raise ValueError(f"a piece of shape {shape} is said to be {saved}")
    return place
