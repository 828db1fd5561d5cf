"""Bounds of rounding errors for the comparison of two runs. docs/verify.md derives the formula."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

# Unit roundoff of each precision, half the distance from 1 to the next number.
UNIT = {"fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8}
# Quantile of the normal distribution for a probability of 1e-9, which `spread_factor` allows for.
Z = 6.0
# Number of independent errors that a tensor is trusted to have: those of its elements are correlated.
MAX_INDEPENDENT = 16
# The spread is that of one process, whose sums are divided in another way than those of a layout.
SAFETY = 2.0
# Factor for too few samples to give any quantile.
MAX_FACTOR = 100.0


@dataclasses.dataclass(frozen=True)
class Rounding:
    """Facts about a run that its rounding errors depend on.

    Attributes:
        precision: of activations and parameters.
        sum_length: terms of the longest sum that layouts divide differently, other than those of gradients and norms.
        tokens: terms of a gradient's sum.
        norm_length: terms that the gradient norm sums at once.
    """

    precision: str
    sum_length: int
    tokens: int
    norm_length: int

    def relative(self, kind: str, name: str) -> float:
        """Relative error of a value that is rounded once and is a sum in fp32: u + u32 √terms."""
        if kind in ("metric", "logged") and "norm" in name:
            terms = self.norm_length
        elif kind in ("activation", "activation gradient", "loss"):
            terms = self.sum_length
        else:
            terms = self.tokens
        stored = (
            UNIT[self.precision]
            if kind in ("activation", "activation gradient", "parameter")
            else UNIT["fp32"]
        )
        return stored + UNIT["fp32"] * math.sqrt(terms)


def spread_factor(size: int, samples: int) -> float:
    """Factor by which an error's norm exceeds its root mean square over `samples` runs once in 10^9 comparisons.

    The squared ratio of two such norms follows Fisher's F distribution with `size` and `samples` x `size` degrees of
    freedom. Its quantile is by the cube-root normal approximation (Wilson and Hilferty, in Paulson's form for F).
    With too few samples for such a quantile it is MAX_FACTOR.
    """
    size = min(size, MAX_INDEPENDENT)
    first, second = 2 / (9 * size), 2 / (9 * size * max(samples, 1))
    # ((1 - b) y - (1 - a))² = z² (a + b y²) for the cube root y of the quantile.
    a = (1 - second) ** 2 - Z * Z * second
    b = -2 * (1 - second) * (1 - first)
    c = (1 - first) ** 2 - Z * Z * first
    if a <= 0:
        return MAX_FACTOR
    return min(MAX_FACTOR, ((-b + math.sqrt(b * b - 4 * a * c)) / (2 * a)) ** 1.5)


def bound(
    scale: float, size: int, spreads: Sequence[float], pooled: Sequence[float], relative: float
) -> float:
    """Largest L2 norm of a difference that rounding explains.

    Args:
        scale: norm of the reference, or of the terms of a sum that cancel (`reference.Reference.scale`).
        size: its number of elements.
        spreads: norms of the differences of runs of one process that only round differently.
        pooled: relative spreads of values like this one, for values of few elements.
        relative: error of one rounding and one sum (`Rounding.relative`).
    """
    floor = relative * scale
    samples = [*spreads, *(value * scale for value in pooled)]
    if not samples:
        return floor
    spread = math.sqrt(sum(value * value for value in samples) / len(samples))
    return floor + (SAFETY * spread_factor(size, len(samples)) * spread if spread else 0.0)
