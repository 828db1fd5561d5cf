"""Rounding of the shares of a blend, on which the order of its samples depends."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

# Megatron-LM asks each dataset of a blend for this many times its share. The number of epochs, and so the order of
# the samples, depends on it.
SURPLUS = 1.005


class BlendRounding:
    """Rounding of Megatron-LM v2.5, on which the order of the samples depends."""

    def normalize(self, weights: Sequence[float]) -> list[float]:
        """Divide weights by their sum. The last bit matters: it decides what `samples_of_share` rounds up."""
        *_, total = itertools.accumulate(weights)
        return [weight / total for weight in weights]

    def samples_of_share(self, samples: int, share: float) -> int:
        """Return the number of samples that a dataset must provide."""
        return math.ceil(samples * share * SURPLUS)

    def unweighted(
        self, tokens: Sequence[int], epochs: Sequence[int]
    ) -> tuple[list[float], list[int] | None]:
        """Weights of the files if none are given, and the fixed numbers of samples to read of each.

        Args:
            tokens: tokens of each file.
            epochs: samples in one pass over each file.

        Returns:
            The weights; and the numbers of samples, None if they follow from the weights.
        """
        return [*tokens], None
