"""Resources that a dry run counts for a rank, as a table and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from megatron.planner.counting import Traffic


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankCost:
    """Resources that a rank needs for an iteration.

    Attributes:
        coordinates: the rank on each axis.
        parameters: number of parameters that the rank holds.
        unique_parameters: those that no other rank of the run counts, excluding vocabulary padding.
        memory: bytes by purpose at the peak of the forward and backward passes; "activations" is everything that these
            passes have allocated by then. "peak" is the maximum over the whole iteration.
        traffic: by kind of communication and name of the axis.
        flops: see `Counter`.
    """

    rank: int
    coordinates: dict[str, int]
    parameters: int
    unique_parameters: int
    memory: dict[str, int]
    traffic: dict[tuple[str, str], Traffic]
    flops: int


def table(costs: list[RankCost]) -> str:
    """The resources of each rank, one column per rank."""
    rows: list[tuple[str, list[str]]] = []

    def row(title: str, value: Callable[[RankCost], str]) -> None:
        rows.append((title, [value(cost) for cost in costs]))

    row("rank", lambda cost: str(cost.rank))
    context = " context," if "cp" in costs[0].coordinates else ""
    row(f"stage, replica,{context} tensor rank", lambda cost: ", ".join(map(str, cost.coordinates.values())))
    row("parameters", lambda cost: f"{cost.parameters:,}")
    rows.append(("memory", []))
    for kind in costs[0].memory:
        rows.append((f"  {kind}", [size(cost.memory[kind]) for cost in costs]))
    keys = sorted({key for cost in costs for key in cost.traffic})
    if keys:
        rows.append(("communication", []))
    for key in keys:
        rows.append((f"  {key[0]}, {key[1]}", [_traffic(cost.traffic.get(key)) for cost in costs]))
    row("operations", lambda cost: size(cost.flops, "FLOP"))
    first = max(len(title) for title, _ in rows)
    widths = [max(len(cells[i]) for _, cells in rows if cells) for i in range(len(costs))]
    return "\n".join(
        "  ".join([title.ljust(first), *(c.rjust(w) for c, w in zip(cells, widths, strict=False))]).rstrip()
        for title, cells in rows
    )


def _traffic(traffic: Traffic | None) -> str:
    return "-" if traffic is None else f"{traffic.calls:,} of {size(traffic.bytes):>8}"


def size(count: float, unit: str = "B") -> str:
    """Format a count of bytes, or of another unit: "16.4 GB"."""
    prefixes = iter("KMGTPE")
    prefix = ""
    while count >= 999.5:
        count, prefix = count / 1000, next(prefixes)
    return f"{count:.3g} {prefix}{unit}"


def as_json(cost: RankCost) -> dict[str, Any]:
    """Return the fields as JSON."""
    record = {field.name: getattr(cost, field.name) for field in dataclasses.fields(cost)}
    record["traffic"] = [
        {"kind": kind, "axis": axis, "calls": traffic.calls, "bytes": traffic.bytes}
        for (kind, axis), traffic in sorted(cost.traffic.items())
    ]
    return record
