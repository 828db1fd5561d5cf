"""Sample order of Megatron-LM's HEAD (August 2026), for --data-order head."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from megatron.data.split import BLEND_SURPLUS, DataOrder


class HeadDataOrder(DataOrder):
    """Rounding of Megatron-LM's HEAD."""

    def split_bounds(self, shares: tuple[float, float, float], size: int) -> list[int]:
        return [round(bound * size) for bound in itertools.accumulate(shares, initial=0.0)]

    def normalize(self, weights: Sequence[float]) -> list[float]:
        total = float(np.sum(weights, dtype=np.float64))
        return [weight / total for weight in weights]

    def samples_of_share(self, samples: int, share: float) -> int:
        return math.ceil(math.ceil(samples * share) * BLEND_SURPLUS)

    def unweighted_blend(
        self, tokens: Sequence[int], epochs: Sequence[int]
    ) -> tuple[list[float], list[int] | None]:
        """Read the whole blend once."""
        return [*epochs], [*epochs]
