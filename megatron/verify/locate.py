"""The first place where a run parts from its reference."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.verify.assemble import local_index
from megatron.verify.compare import Comparer, Comparison
from megatron.verify.format import Capture, Place, Record
from megatron.verify.patterns import Evidence, kind_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """The first difference of a run.

    Attributes:
        what: kind of the record, such as "gradient".
        module: module or parameter.
        ranks: ranks with a difference in the same tensor.
        microbatch: index of its first sample; None for values of the whole batch.
        pattern: kind of the fault.
        look_at: what to look at.
        others: number of other modules or parameters with a difference of this kind in this step.
    """

    what: str
    module: str
    step: int
    ranks: tuple[int, ...]
    microbatch: int | None
    pattern: str
    look_at: str
    others: int

    def __str__(self) -> str:
        where = f"step {self.step}, {self.what} of {self.module}"
        if self.others:
            where += f" and {self.others} more"
        if self.microbatch is not None:
            where += f", microbatch of sample {self.microbatch}"
        return f"{where}, rank {', '.join(map(str, self.ranks))}: {self.pattern}; look at {self.look_at}"

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def first_difference(comparer: Comparer, other: Capture, comparisons: Sequence[Comparison]) -> Finding | None:
    """Locate the first difference in the order of computation; None if all comparisons passed."""
    failed = [comparison for comparison in comparisons if not comparison.passed]
    if not failed:
        return None
    first = min(failed, key=lambda comparison: comparison.sort_key)
    record = first.record
    same = [c.record for c in failed if c.record.id == record.id]
    pattern = first.fault or kind_of(_evidence(comparer, other, record, first.bound))
    return Finding(
        what=record.kind,
        module=record.name or "the model",
        step=record.step,
        ranks=tuple(sorted({r.rank for r in same})),
        microbatch=record.sample,
        pattern=pattern,
        look_at=_look_at(record, comparer.reference.start, pattern),
        others=len({c.record.name for c in failed if c.record.id[:2] == record.id[:2]}) - 1,
    )


def _look_at(record: Record, start: int, pattern: str) -> str:
    name = record.name or "the model"
    if record.step == start:
        return "initial values, or the loading of the checkpoint"
    match record.kind:
        case "mask":
            return f"the seed of dropout in {name}"
        case "activation":
            return f"the forward pass of {name}, and what it reads"
        case "activation gradient" if not record.name:
            return "the scale of the loss, its mask and its denominators"
        case "activation gradient":
            return f"the backward pass of {' or '.join(record.read_by) or f'what reads the output of {name}'}"
        case "gradient":
            return (
                "the reduction of gradients, the axis of the parameter's group"
                if "sum" in pattern
                else f"the weight gradient of {name}, and its reduction"
            )
        case "loss":
            return "the loss, its mask and the labels"
        case "update" | "state":
            return f"the optimizer's step for {name}, clipping and the learning rate"
        case "parameter" | "weight":
            return "the copy of master weights to parameters, and their all-gather"
    return f"the computation of {name} from values of all ranks"


def _evidence(comparer: Comparer, other: Capture, record: Record, bound: float) -> Evidence:
    whole = comparer.reference.whole(record.id)
    assert whole is not None
    records = other.by_id()
    group = [r for r in records[record.id] if r.key is not None]
    values = _total(other, group, record)
    part = comparer.part(record, values, whole, other.sizes)
    assert part is not None
    index, mask = part
    flat = values.double().view(-1)[mask]
    return Evidence(
        values=flat,
        reference=whole.view(-1)[index[mask]],
        bound=bound,
        along={} if record.sum_over else _along(other, group, record, mask),
        local=_local(other, records, record, mask),
        earlier=_earlier(comparer, record, index[mask]),
        slices=[] if record.place is None else _other_slices(whole, record.place, mask),
        sizes=_numbers(other),
        is_random=record.kind == "mask" or record.step == 0,
    )


def _total(other: Capture, group: Sequence[Record], record: Record) -> Tensor:
    if not record.sum_over:
        return other.read(record)
    rest = {k: v for k, v in record.coordinates.items() if k not in record.sum_over}
    same = [r for r in group if all(r.coordinates[k] == v for k, v in rest.items())]
    return torch.stack([other.read(r).double() for r in same]).sum(0)


def _along(other: Capture, group: Sequence[Record], record: Record, mask: Tensor) -> dict[str, list[Tensor]]:
    """Values in the same place on the ranks of each axis."""
    found = {}
    for axis, size in other.sizes.items():
        rest = {k: v for k, v in record.coordinates.items() if k != axis}
        line = [
            r
            for r in group
            if all(r.coordinates[k] == v for k, v in rest.items()) and r.place == record.place
        ]
        if size > 1 and len(line) > 1:
            line.sort(key=lambda r: r.rank != record.rank)
            found[axis] = [other.read(r).double().view(-1)[mask] for r in line]
    return found


def _local(
    other: Capture, records: dict[tuple, list[Record]], record: Record, mask: Tensor
) -> dict[str, list[Tensor]]:
    """Gradients before their sum over the ranks that have the same parameter, for the same elements."""
    if record.kind != "gradient" or record.place is None:
        return {}
    id = (record.step, "local gradient", record.name, record.sample, record.index)
    group = records.get(id, [])
    axis = next((axis for r in group for axis in r.sum_over if other.sizes.get(axis, 1) > 1), "dp")
    rest = {k: v for k, v in record.coordinates.items() if k != axis}
    line = [r for r in group if r.key and all(r.coordinates[k] == v for k, v in rest.items())]
    line.sort(key=lambda r: r.rank != record.rank)
    cut = slice(*record.place.flat) if record.place.flat else slice(None)
    return {axis: [other.read(r).double().view(-1)[cut][mask] for r in line]} if len(line) > 1 else {}


def _earlier(comparer: Comparer, record: Record, index: Tensor) -> dict[str, Tensor]:
    """The reference's values in earlier steps, and in the other microbatches of this step."""
    found = {}
    step, kind, name, _, number = record.id
    for id in comparer.reference.records:
        if id[1:3] == (kind, name) and id[4] == number and id != record.id and id[0] <= step:
            whole = comparer.reference.whole(id)
            if whole is not None and whole.numel() > int(index.max()):
                label = f"step {id[0]}" + ("" if id[3] is None else f", sample {id[3]}")
                found[label] = whole.view(-1)[index]
    return found


def _other_slices(whole: Tensor, place: Place, mask: Tensor) -> list[Tensor]:
    """Parts of the whole tensor that other ranks would hold, without the elements that are padding on this rank."""
    if place.flat is not None and place.flat != (0, math.prod(place.local_shape)):
        return []
    length = sum(end - begin for begin, end in place.ranges)
    total = whole.shape[place.dim]
    found = []
    for begin in range(0, total - length + 1, length):
        moved = dataclasses.replace(
            place, ranges=((begin, begin + length),), valid=None, shape=tuple(whole.shape)
        )
        index, _ = local_index(moved)
        found.append(whole.view(-1)[index][mask])
    return found


def _numbers(other: Capture) -> dict[str, int]:
    """Numbers that a value may wrongly be scaled by."""
    sizes = {f"the {axis} size": size for axis, size in other.sizes.items()}
    batch, micro = (other.run.get(f"{name}_batch_size", 0) for name in ("global", "micro"))
    if batch and micro:
        sizes["the number of microbatches"] = batch // micro // other.sizes.get("dp", 1)
        sizes["the microbatch size"] = micro
    return sizes
