"""Kinds of faults."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.verify.patterns import Evidence, kind_of


def draw(seed: int, size: int = 60) -> Tensor:
    return torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


A, B, NOISE = draw(0), draw(1), 1e-9 * draw(2)
RIGHT = A + B


def kind(values: Tensor, reference: Tensor = RIGHT, **evidence: object) -> str:
    sizes = {"the tp size": 4, "the dp size": 2, "the number of microbatches": 8}
    return kind_of(Evidence(values=values + NOISE, reference=reference, bound=1e-7, sizes=sizes, **evidence))


@pytest.mark.parametrize(
    ("values", "evidence", "expected"),
    [
        (A, {"along": {"tp": [A, B]}}, "missing sum over the tp axis"),
        (A, {"local": {"dp": [A, B]}}, "missing sum over the dp axis"),
        (RIGHT * 2, {}, "summed twice, or scaled by the dp size"),
        (RIGHT * 4, {}, "scaled by the tp size: 4 times"),
        (
            RIGHT / 8,
            {},
            "divided by the number of microbatches, or a missing sum of equal parts: 0.125 times",
        ),
        (RIGHT * 1.0001, {}, "scaled: 1.0001 times"),
        (RIGHT + B, {"local": {"dp": [B, A]}}, "one rank's part of the dp axis summed twice or left out"),
        (A, {"earlier": {"step 1": A}}, "stale: the value of step 1"),
        (A, {"slices": [B, A]}, "wrong slice: another part of the whole tensor"),
        (RIGHT.flip(0), {}, "permutation of the right values"),
        (draw(3) * 1.4, {"is_random": True}, "other random numbers"),
        (torch.cat((RIGHT[:30], 0 * RIGHT[30:])), {}, "wrong in 50% of the elements, from 30 to 59"),
        (RIGHT * torch.nan, {}, "not finite"),
        (draw(3), {}, "other values"),
    ],
)
def test_kinds(values: Tensor, evidence: dict, expected: str) -> None:
    assert kind(values, **evidence) == expected


def test_zeros() -> None:
    assert kind_of(Evidence(values=0 * RIGHT, reference=RIGHT, bound=1e-7)) == "missing: all zero"


def test_equal_parts_are_no_missing_sum() -> None:
    """Ranks that agree hold no partial sums: the value is half of what it should be."""
    assert kind(A, reference=2 * A, along={"tp": [A, A]}).startswith("divided by the dp size")
