"""Bounds of rounding errors."""

from __future__ import annotations

import pytest
import torch

from megatron.verify.tolerance import MAX_FACTOR, Rounding, bound, spread_factor


@pytest.mark.parametrize(
    ("size", "samples", "exact"),
    # Square roots of quantiles of F(size, size x samples) at an upper tail of 9.866e-10 (z = 6), by mpmath's
    # regularized incomplete beta function.
    [(1, 12, 16.900), (4, 4, 8.1155), (16, 3, 3.0304), (16, 4, 2.7842), (16, 12, 2.3585)],
)
def test_factor_is_the_quantile_of_fishers_distribution(size: int, samples: int, exact: float) -> None:
    # The approximation is on the safe side, and close unless there are few degrees of freedom.
    assert exact <= spread_factor(size, samples) <= exact * (1.03 if size == 16 else 1.4)


def test_factor_without_enough_samples() -> None:
    assert spread_factor(1, 1) == spread_factor(1, 3) == MAX_FACTOR
    assert spread_factor(10**6, 3) == spread_factor(16, 3)


def test_divided_sums_of_fp32_are_within_the_bound_and_a_fault_is_not() -> None:
    """Sums of 4,096 terms in fp32, by blocks in random order, as a layout divides them."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 4096, generator=generator)
    reference = x.sum(1)

    def divided() -> torch.Tensor:
        order = torch.randperm(4096, generator=generator)
        return sum(part.sum(1) for part in x[:, order].chunk(4, dim=1))

    spreads = [float((divided() - reference).double().norm()) for _ in range(3)]
    relative = Rounding("fp32", 4096, 1, 1).relative("activation", "")
    limit = bound(float(reference.norm()), 64, spreads, [], relative)
    for _ in range(200):
        assert float((divided() - reference).double().norm()) < limit
    assert limit < 1e-4 * float(reference.norm())


def test_bound_without_spread_is_one_rounding_and_one_sum() -> None:
    rounding = Rounding("bf16", sum_length=64, tokens=256, norm_length=1024)
    assert rounding.relative("activation", "mlp") == 2**-8 + 8 * 2**-24
    assert rounding.relative("gradient", "w") == 17 * 2**-24
    assert rounding.relative("metric", "grad norm") == 33 * 2**-24
    assert bound(10.0, 100, [], [], 1e-3) == 1e-2
    assert bound(10.0, 100, [0.0, 0.0], [], 1e-3) == 1e-2
