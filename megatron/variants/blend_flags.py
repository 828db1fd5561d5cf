"""Parsing of data flags: blends of token files, and phases of blends.

It imports no torch, so that the command line can use it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Sequence

from megatron.data.config import DataConfig
from megatron.errors import InputError

MAX_DATASETS = 2**15 - 1  # their numbers have 16 bits
PHASE = re.compile(r"from=(.*)")


@dataclasses.dataclass(frozen=True)
class DataPhase:
    """A part of the training samples with a blend of its own.

    Attributes:
        start: number of training samples before it.
        words: of its blend.
    """

    start: int
    words: tuple[str, ...]


def split_phases(values: Sequence[str], flag: str) -> list[DataPhase]:
    """Split the values of a data flag, 'BLEND from=SAMPLES BLEND ...', into its phases.

    Raises:
        InputError: a phase has no data, or does not begin after the one before it.
    """
    phases = [DataPhase(0, ())]
    for value in values:
        if value.lower().startswith("from=") and not value.startswith("from="):
            raise InputError(f"{flag}: {value} begins no phase; write from={value[5:]}")
        if (border := PHASE.fullmatch(value)) is None:
            phases[-1] = dataclasses.replace(phases[-1], words=(*phases[-1].words, value))
            continue
        before, text = phases[-1], border[1]
        if not before.words:
            where = f"from={before.start}" if len(phases) > 1 else "the start of the run"
            raise InputError(f"{flag}: no data from {where} to {value}; give the blend before {value}")
        if not re.fullmatch("[0-9]{1,15}", text) or int(text) <= before.start:
            raise InputError(
                f"{flag}: {value} must be from=SAMPLES with a number of training samples above {before.start}"
            )
        phases.append(DataPhase(int(text), ()))
    if len(phases) > 1 and not phases[-1].words:
        raise InputError(f"{flag}: no data after from={phases[-1].start}; give a blend, or leave it out")
    return phases


def phases_after(values: Sequence[str], flag: str, samples: int) -> list[str]:
    """Values of a data flag for a run that begins after `samples` training samples of this one."""
    words: list[str] = []
    phases = split_phases(values, flag)
    for phase, following in itertools.zip_longest(phases, phases[1:]):
        if following is None or following.start > samples:
            words += [f"from={phase.start - samples}"] if words else []
            words += phase.words
    return words


def data_prefixes(values: Sequence[str], flag: str) -> list[str]:
    """Prefixes of all files that a data flag names, each once. Raises `InputError` as `parse_blend`."""
    found = (parse_blend(phase.words, flag)[0] for phase in split_phases(values, flag))
    return list(dict.fromkeys(itertools.chain.from_iterable(found)))


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


def check_phases(config: DataConfig) -> None:
    """Check the phases of the data flags.

    Raises:
        InputError: a phase is wrong, or phases do not go with another flag.
    """
    for split in ("", "train-", "valid-", "test-"):
        flag, values = f"--{split}data-path", getattr(config, f"{split}data-path".replace("-", "_"))
        phases = split_phases(values or (), flag)
        if len(phases) == 1:
            continue
        first = f"{flag}: from={phases[1].start}"
        if split in ("valid-", "test-"):
            raise InputError(f"{first} begins a phase of the training data; give one blend")
        if config.dataloader_type == "cyclic":
            raise InputError(
                f"{first} needs --dataloader-type single: cyclic reads all data again in every epoch"
            )
        for phase in phases:
            place = f"{flag}: the phase from={phase.start}" if phase.start else f"{flag}: the first phase"
            prefixes, weights = parse_blend(phase.words, place)
            twice = [prefix for prefix in prefixes if prefixes.count(prefix) > 1]
            if twice:
                raise InputError(f"{flag}: {twice[0]} is given twice in a phase; add up its weights")
            if config.data_order == "head" and weights is None and len(prefixes) > 1:
                raise InputError(
                    f"{flag}: --data-order head reads {' '.join(prefixes)} once without weights; a phase needs weights"
                )
