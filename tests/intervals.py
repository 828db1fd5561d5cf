"""Intervals of a run between two log lines."""

from __future__ import annotations

import math
from typing import Any

from megatron.training.report import Interval


def interval(rows: list[tuple[int, float, float]], **fields: Any) -> Interval:
    """Return the interval of `rows`: iteration, loss and gradient norm of each."""
    return Interval(
        **{
            "rows": [
                {"iteration": i, "consumed samples": 8 * i, "lm loss": loss, "grad norm": norm}
                | {"skipped": float(not math.isfinite(norm))}
                for i, loss, norm in rows
            ],
            "loss_names": ("lm loss",),
            "train_iters": 500,
            "lr": 1.5e-4,
            "batch_size": 8,
            "seconds": 0.1234,
            "iterations": len(rows),
            "values": {"tokens per second": 12345.6, "TFLOP/s per device": 0.5, "mfu": 0.4531, "hfu": 0.5},
            **fields,
        }
    )
