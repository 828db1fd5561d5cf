"""The kind of a fault, from the pattern of a difference."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

# Part of a difference that may be left if a pattern explains it, and if a permutation does: after sorting, the values
# of two tensors of random numbers are alike.
LEFT, LEFT_SORTED = 0.05, 1e-3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evidence:
    """Values that tell the kind of a fault. Tensors are flat, fp64.

    Attributes:
        values: the wrong values of a rank.
        reference: the right ones.
        bound: difference that rounding explains.
        along: by axis, the values of its ranks in the same place, this rank's included.
        local: by axis, the gradients of its ranks before their sum, this rank's first.
        earlier: the reference's values at earlier steps or in other microbatches, by name.
        slices: other parts of the whole reference of the same size.
        sizes: sizes of the axes, and other numbers that a value may be scaled by, by name.
        is_random: the values are random numbers: masks, or weights before the first step.
    """

    values: Tensor
    reference: Tensor
    bound: float
    along: Mapping[str, Sequence[Tensor]] = dataclasses.field(default_factory=dict)
    local: Mapping[str, Sequence[Tensor]] = dataclasses.field(default_factory=dict)
    earlier: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    slices: Sequence[Tensor] = ()
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    is_random: bool = False

    def explains(self, candidate: Tensor) -> bool:
        """True if the wrong values are `candidate`, up to rounding."""
        if candidate.shape != self.values.shape:
            return False
        left, difference = (float((self.values - x).norm()) for x in (candidate, self.reference))
        return left <= max(self.bound, LEFT * difference) and left < difference

    def is_permutation(self) -> bool:
        """True if the wrong values are the right ones in another order, up to rounding."""
        a, b = self.values.sort().values, self.reference.sort().values
        difference = float((self.values - self.reference).norm())
        return float((a - b).norm()) <= max(self.bound, LEFT_SORTED * difference)


def kind_of(evidence: Evidence) -> str:
    """Describe the kind of a fault: the first pattern that explains the difference."""
    return next(_kinds(evidence), "other values")


def _kinds(e: Evidence) -> Iterator[str]:
    if not bool(e.values.isfinite().all()):
        yield "not finite"
    if not bool(e.values.any()):
        yield "missing: all zero"
    for axis, parts in {**e.local, **e.along}.items():
        is_sum = _all_differ(parts, e) and _close(sum(parts[1:], parts[0]), e.reference, e)
        if len(parts) > 1 and is_sum and any(e.explains(part) for part in parts):
            yield f"missing sum over the {axis} axis"
    for name, values in e.earlier.items():
        if e.explains(values):
            yield f"stale: the value of {name}"
    yield from _scaled(e)
    for axis, parts in {**e.local, **e.along}.items():
        if any(e.explains(e.reference + sign * part) for part in parts[:2] for sign in (1, -1)):
            yield f"one rank's part of the {axis} axis summed twice or left out"
    if any(e.explains(part) for part in e.slices):
        yield "wrong slice: another part of the whole tensor"
    if e.values.numel() > 4 and e.is_permutation():
        yield "permutation of the right values"
    yield from _random(e)
    yield from _partial(e)


def _all_differ(parts: Sequence[Tensor], e: Evidence) -> bool:
    return all(float((part - parts[0]).norm()) > e.bound for part in parts[1:])


def _close(a: Tensor, b: Tensor, e: Evidence) -> bool:
    # The parts of each rank have the rounding of one value.
    return a.shape == b.shape and float((a - b).norm()) <= max(
        4 * e.bound, LEFT * float((e.values - b).norm())
    )


def _scaled(e: Evidence) -> Iterator[str]:
    squares = float(e.reference @ e.reference)
    if not squares:
        return
    factor = float(e.values @ e.reference) / squares
    if abs(factor) < 1e-6 or not e.explains(e.reference * factor):
        return
    names = [name for name, size in e.sizes.items() if size > 1 and math.isclose(factor, size, rel_tol=2e-2)]
    parts = [
        name for name, size in e.sizes.items() if size > 1 and math.isclose(factor * size, 1, rel_tol=2e-2)
    ]
    if math.isclose(factor, 2, rel_tol=2e-2):
        yield "summed twice" + (f", or scaled by {_either(names)}" if names else "")
    elif names:
        yield f"scaled by {_either(names)}: {factor:.4g} times"
    elif parts:
        yield f"divided by {_either(parts)}, or a missing sum of equal parts: {factor:.4g} times"
    else:
        yield f"scaled: {factor:.6g} times"


def _either(names: Sequence[str]) -> str:
    return " or ".join(names)


def _random(e: Evidence) -> Iterator[str]:
    if not e.is_random:
        return
    a, b = e.values - e.values.mean(), e.reference - e.reference.mean()
    if not float(b.norm()):
        return
    alike = math.isclose(float(a.norm()), float(b.norm()), rel_tol=0.25)
    if alike and abs(float(a @ b)) < 0.5 * float(a.norm() * b.norm()):
        yield "other random numbers"


def _partial(e: Evidence) -> Iterator[str]:
    """Elements that are wrong while most are right."""
    scale = e.bound / math.sqrt(max(e.values.numel(), 1))
    wrong = (e.values - e.reference).abs() > max(4 * scale, 1e-12)
    share = float(wrong.double().mean())
    if 0 < share < 0.9:
        found = wrong.nonzero().flatten()
        zero = not bool(e.values[wrong].any())
        what = "missing (zero)" if zero else "wrong"
        yield f"{what} in {share:.0%} of the elements, from {int(found[0])} to {int(found[-1])}"
