"""Sample order of Megatron-LM's HEAD (August 2026), for --data-order head."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from megatron.data.split import Shares
from megatron.variants.blend_rounding import SURPLUS, BlendRounding


def head_split_bounds(shares: Shares, size: int) -> list[int]:
    """Return the bounds of train, validation and test as Megatron-LM's HEAD."""
    return [round(bound * size) for bound in itertools.accumulate(shares, initial=0.0)]


class HeadBlendRounding(BlendRounding):
    """Rounding of Megatron-LM's HEAD."""

    def normalize(self, weights: Sequence[float]) -> list[float]:
        total = float(np.sum(weights, dtype=np.float64))
        return [weight / total for weight in weights]

    def samples_of_share(self, samples: int, share: float) -> int:
        return math.ceil(math.ceil(samples * share) * SURPLUS)

    def unweighted(
        self, tokens: Sequence[int], epochs: Sequence[int]
    ) -> tuple[list[float], list[int] | None]:
        """Read the whole blend once."""
        return [*epochs], [*epochs]
