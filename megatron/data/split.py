"""The split of documents into training, validation and test data, with Megatron-LM's rounding."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

from megatron.errors import InputError

DEFAULT_SPLIT = "969, 30, 1"
Shares = tuple[float, float, float]  # of train, validation and test, which sum to 1


def parse_split(text: str) -> Shares:
    """Parse --split.

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


def split_bounds(shares: Shares, size: int) -> list[int]:
    """Return the four bounds that cut range(size) into train, validation and test, as Megatron-LM v2.5.

    Rounds each share, half to even. The training split absorbs the excess or shortfall: all bounds move by it.
    """
    bounds = [0, *itertools.accumulate(round(share * size) for share in shares)]
    excess = bounds[-1] - size
    return [0] + [max(0, bound - excess) for bound in bounds[1:]]


# The rounding of `split_bounds`, by --data-order. `megatron.plugins` adds to it.
DATA_ORDERS: dict[str, Callable[[Shares, int], list[int]]] = {"v2.5": split_bounds}
