"""Map the records of ranks to the tensors of the whole model."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.verify.format import Capture, Place, Record


def assemble(capture: Capture, records: Sequence[Record]) -> Tensor | None:
    """The whole tensor that the records of a capture make up, in fp64, without padding rows.

    Returns:
        None if values were not written, or elements are missing.
    """
    if any(record.key is None for record in records):
        return None
    first = records[0]
    if first.sum_over:
        return sums(capture, records)[0][1]
    if first.place is None:
        return capture.read(first).double()
    shape = valid_shape(first.place)
    whole = torch.full(shape, math.nan, dtype=torch.float64)
    for record in records:
        assert record.place is not None
        index, mask = local_index(record.place)
        values = capture.read(record).double().flatten()
        whole.view(-1)[index[mask]] = values[mask]
    return None if whole.isnan().any() and not _has_nan(capture, records) else whole


def _has_nan(capture: Capture, records: Sequence[Record]) -> bool:
    return any(bool(capture.read(record).isnan().any()) for record in records)


def valid_shape(place: Place) -> tuple[int, ...]:
    """Shape of the whole tensor without padding rows."""
    return place.shape if place.valid is None else (place.valid, *place.shape[1:])


@functools.lru_cache(maxsize=512)
def local_index(place: Place) -> tuple[Tensor, Tensor]:
    """For each element of a flat local tensor, its index in the flat whole tensor, and false where it is padding."""
    shape = valid_shape(place)
    along = torch.cat([torch.arange(begin, end) for begin, end in place.ranges])
    stride = math.prod(shape[place.dim + 1 :])
    outer = torch.arange(math.prod(place.local_shape[: place.dim]))
    inner = torch.arange(math.prod(place.local_shape[place.dim + 1 :]))
    index = (outer[:, None, None] * shape[place.dim] + along[None, :, None]) * stride + inner
    cut = slice(None) if place.flat is None else slice(*place.flat)
    flat = index.reshape(-1)[cut]
    return flat, flat < math.prod(shape)  # padding rows come last


def inferred_place(shape: Sequence[int], whole: Sequence[int], rank: int, size: int) -> Place | None:
    """Place of a tensor-parallel rank's activation that differs from the whole one in one dimension.

    The ranks are taken to hold equal, consecutive parts; ranks may share one.
    """
    differing = [i for i, (a, b) in enumerate(zip(shape, whole, strict=False)) if a != b]
    if len(shape) != len(whole) or len(differing) != 1:
        return None
    dim = differing[0]
    local, total = shape[dim], whole[dim]
    if total % local or size % (total // local):
        return None
    begin = rank * (total // local) // size * local
    return Place(shape=tuple(whole), dim=dim, ranges=((begin, begin + local),), local_shape=tuple(shape))


def sums(capture: Capture, records: Sequence[Record]) -> list[tuple[Record, Tensor]]:
    """Sum the records over their axes `sum_over`. Returns a record of each sum, and the sum."""
    groups: dict[tuple, list[Record]] = {}
    for record in records:
        rest = tuple(v for k, v in sorted(record.coordinates.items()) if k not in record.sum_over)
        groups.setdefault(rest, []).append(record)
    found = []
    for group in groups.values():
        total = capture.read(group[0]).double()
        for record in group[1:]:
            total = total + capture.read(record).double()
        found.append((group[0], total))
    return found
