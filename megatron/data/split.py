"""How --split divides a data set among training, validation and testing."""

from __future__ import annotations

import itertools
import math

from megatron.flags import InputError

DEFAULT_SPLIT = "969, 30, 1"


def parse_split(text: str) -> tuple[float, float, float]:
    """Shares of train, validation and test, which sum to 1.

    Numbers are separated by ',' (or, where there is none, by '/'); they need not sum to anything in
    particular, and those left out at the end are 0. Quotes around them, as the scripts of Megatron-LM for Llama
    pass them, do not count.

    Raises:
        InputError: not one to three numbers of at least 0, or all are 0.
    """
    want = (
        f"up to three numbers of at least 0 for train, validation and test are wanted, like {DEFAULT_SPLIT}"
    )
    try:
        shares = [float(part) for part in text.strip("'\"").split("," if "," in text else "/")]
    except ValueError:
        raise InputError(f"--split: {text!r} is not a list of numbers; {want}") from None
    *_, total = itertools.accumulate(shares)  # sum() of Python 3.12 rounds otherwise than Megatron-LM did
    if len(shares) > 3 or min(shares) < 0 or not 0 < total < math.inf:
        raise InputError(f"--split: {text!r} does not divide the data; {want}")
    train, valid, test = (share / total for share in shares + [0.0] * (3 - len(shares)))
    return train, valid, test


def split_bounds(shares: tuple[float, float, float], size: int, order: str) -> list[int]:
    """Four bounds that cut `range(size)` into train, validation and test, rounded as Megatron-LM does.

    v2.5 rounds each share on its own (half to even); what is then too many or too few is taken from or given
    to the training part by moving every bound. Its HEAD rounds each bound.

    Args:
        order: --data-order, 'v2.5' or 'head'.
    """
    if order == "head":
        return [round(bound * size) for bound in itertools.accumulate(shares, initial=0.0)]
    bounds = [0]
    for share in shares:
        bounds.append(bounds[-1] + round(share * size))
    excess = bounds[-1] - size
    return [0] + [max(0, bound - excess) for bound in bounds[1:]]
