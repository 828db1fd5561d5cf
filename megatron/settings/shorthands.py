"""Switches that stand for the value of another flag."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron.errors import InputError
from megatron.flags import flag
from megatron.training.config import PluginConfig

# Values of --recompute-granularity, by the field of the switch.
RECOMPUTE = {"recompute_activations": "selective", "checkpoint_activations": "full"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShorthandConfig(PluginConfig):
    """Shorthands for other flags."""

    recompute_activations: bool = flag(False, "shorthand for --recompute-granularity selective")
    checkpoint_activations: bool = flag(
        False, "shorthand for --recompute-granularity full --recompute-method uniform"
    )


def expand_shorthands(given: dict[str, Any]) -> dict[str, Any]:
    """Add the values that shorthands stand for to those given.

    Raises:
        InputError: two shorthands are given, or one with another value of the flag.
    """
    used = [name for name in RECOMPUTE if given.get(name)]
    if len(used) > 1:
        raise InputError(
            "--recompute-activations and --checkpoint-activations exclude each other; leave one of them out"
        )
    for name in used:
        meaning = RECOMPUTE[name]
        if given.get("recompute_granularity", meaning) != meaning:
            raise InputError(
                f"--{name.replace('_', '-')} means --recompute-granularity {meaning}; leave one of them out"
            )
        given = given | {"recompute_granularity": meaning}
    return given
