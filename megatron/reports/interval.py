"""Values that reports derive from the iterations of an interval. Imports no torch, as formats of the log must not."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.training.report import Interval


def is_bad(row: dict[str, float]) -> bool:
    """True if the loss or gradient of an iteration was not finite, unless the fp16 loss scale overflowed."""
    return not math.isfinite(row["grad norm"]) and not row.get("overflow")


def num_bad(interval: Interval) -> int:
    """Iterations whose loss or gradient was not finite, without overflows of the fp16 loss scale."""
    return sum(map(is_bad, interval.rows))


def num_skipped(interval: Interval) -> int:
    """Iterations that changed no weights."""
    return int(sum(row["skipped"] for row in interval.rows))


def mean_losses(interval: Interval) -> dict[str, float]:
    """Mean of each loss over the iterations."""
    rows = interval.rows
    return {name: sum(row[name] for row in rows) / len(rows) for name in interval.loss_names}
