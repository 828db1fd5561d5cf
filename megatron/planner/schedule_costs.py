"""Costs of a pipeline schedule: its duration, its bubble, and the microbatches in flight."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.parallel.schedules import BackwardInput, Compute, Forward, Timeline


def bubble_fraction(stages: int, chunks: int, microbatches: int) -> float:
    """Bubble time over ideal compute time, (p - 1) / (v m), ignoring transfers (2104.04473 section 2.2)."""
    return (stages - 1) / (chunks * microbatches)


def makespan(timeline: Timeline) -> float:
    """Time from the first start to the last end."""
    return max(row[-1][2] for row in timeline)


def peak_in_flight(actions: Sequence[Compute]) -> int:
    """Largest number of forwards of a rank whose backward, or weight gradients if it is split, has not run."""
    peak = held = 0
    for action in actions:
        held += 1 if isinstance(action, Forward) else 0 if isinstance(action, BackwardInput) else -1
        peak = max(peak, held)
    return peak
