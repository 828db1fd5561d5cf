"""Parsing of data flags that name several token files. It imports no torch, so that the command line can use it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron.errors import InputError

MAX_DATASETS = 2**15 - 1  # their numbers have 16 bits


def parse_blend(values: Sequence[str], flag: str) -> tuple[list[str], list[float] | None]:
    """Parse a data flag into prefixes and weights.

    Args:
        values: 'weight prefix' pairs, or prefixes alone. Prefixes alone have no weights (None) and are sampled in
            proportion to their sizes.
        flag: name of the flag, for messages.

    Raises:
        InputError: no values, an unpaired weight or prefix, or a weight that is not a positive number.
    """
    if not values:
        raise InputError(f"{flag} is empty; give a prefix, or 'weight prefix weight prefix ...'")
    if len(values) > 2 * MAX_DATASETS:
        raise InputError(f"{flag}: {len(values)} values; a blend has at most {MAX_DATASETS} datasets")
    numbers = [_number(value) for value in values[::2]]
    if len(values) == 1 or all(number is None for number in numbers):
        return list(values), None
    if len(values) % 2:
        raise InputError(
            f"{flag}: {len(values)} values; weights and prefixes come in pairs, 'weight prefix weight prefix ...'"
        )
    weights = []
    for weight, value, prefix in zip(numbers, values[::2], values[1::2], strict=True):
        if weight is None:
            raise InputError(f"{flag}: expected the weight of {prefix}, but {value!r} is not a number")
        if not 0 < weight < math.inf:
            raise InputError(f"{flag}: the weight of {prefix} is {value}; it must be positive and finite")
        weights.append(weight)
    return list(values[1::2]), weights


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
