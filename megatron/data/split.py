"""Rounding rules of Megatron-LM that decide the order of samples: the split of documents, the shares of a blend."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from megatron.errors import InputError

DEFAULT_SPLIT = "969, 30, 1"
# Megatron-LM asks each dataset of a blend for this many times its share. The number of epochs, and so the order of
# the samples, depends on it.
BLEND_SURPLUS = 1.005


def parse_split(text: str) -> tuple[float, float, float]:
    """Parse --split into the shares of train, validation and test, which sum to 1.

    The numbers are separated by ',' or, if there is none, by '/'. Missing ones are 0. Quotes around the list are
    ignored, because Megatron-LM's Llama scripts pass them.

    Raises:
        InputError: not one to three non-negative numbers with a positive, finite sum.
    """
    expected = (
        f"expected up to three non-negative numbers for train, validation and test, such as {DEFAULT_SPLIT}"
    )
    try:
        shares = [float(part) for part in text.strip("'\"").split("," if "," in text else "/")]
    except ValueError:
        raise InputError(f"--split: {text!r} is not a list of numbers; {expected}") from None
    *_, total = itertools.accumulate(shares)  # not sum(): since Python 3.12 it rounds unlike Megatron-LM
    if len(shares) > 3 or min(shares) < 0 or not 0 < total < math.inf:
        raise InputError(f"--split: {text!r} does not divide the data; {expected}")
    train, valid, test = (share / total for share in shares + [0.0] * (3 - len(shares)))
    return train, valid, test


class DataOrder:
    """Rounding of Megatron-LM v2.5."""

    def split_bounds(self, shares: tuple[float, float, float], size: int) -> list[int]:
        """Return the four bounds that cut range(size) into train, validation and test.

        Rounds each share, half to even. The training split absorbs the excess or shortfall: all bounds move by it.
        """
        bounds = [0, *itertools.accumulate(round(share * size) for share in shares)]
        excess = bounds[-1] - size
        return [0] + [max(0, bound - excess) for bound in bounds[1:]]

    def normalize(self, weights: Sequence[float]) -> list[float]:
        """Divide weights by their sum. The last bit matters: it decides what `samples_of_share` rounds up."""
        *_, total = itertools.accumulate(weights)
        return [weight / total for weight in weights]

    def samples_of_share(self, samples: int, share: float) -> int:
        """Return the number of samples that a dataset of a blend must provide."""
        return math.ceil(samples * share * BLEND_SURPLUS)

    def unweighted_blend(
        self, tokens: Sequence[int], epochs: Sequence[int]
    ) -> tuple[list[float], list[int] | None]:
        """Weights of a blend's files if none are given, and the fixed numbers of samples to read of each.

        Args:
            tokens: tokens of each file.
            epochs: samples in one pass over each file.

        Returns:
            The weights; and the numbers of samples, None if they follow from the weights.
        """
        return [*tokens], None


# Choices of --data-order; megatron.plugins adds to them.
DATA_ORDERS = {"v2.5": DataOrder()}
