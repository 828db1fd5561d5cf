"""Variants of the model: classes that replace its parts, chosen by flags. Their code is outside of the core."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from megatron.errors import InputError
from megatron.model.config import ModelConfig
from megatron.ops.rotary import RopeScaling

Layer = TypeVar("Layer")

# For each name in `VARIANT_VALUES` and `VARIANT_FLAGS`, the parts of the model that it replaces, with their
# replacements. Filled by `megatron.variants.registry`.
VARIANTS: dict[str, dict[type, type]] = {}
ROPE_SCALINGS: dict[str, Callable[[ModelConfig], RopeScaling]] = {}  # by --rope-scaling-type


def variant(part: type[Layer], config: ModelConfig) -> type[Layer]:
    """The class to build for a part of the model: `part` itself, or its replacement. One that extends the others does
    what all of their flags ask for.

    Raises:
        InputError: several flags replace it.
    """
    found = {name: VARIANTS[name][part] for name in config.variants if part in VARIANTS[name]}
    best = max(found.values(), key=lambda kind: len(kind.__mro__), default=part)
    if not all(issubclass(best, kind) for kind in found.values()):
        values = ((name, getattr(config, name)) for name in found)
        given = ((name, f" {value}" if isinstance(value, str) else "") for name, value in values)
        flags = " and ".join(f"--{name.replace('_', '-')}{value}" for name, value in given)
        raise InputError(f"{flags} exclude each other; leave one of them out")
    return best
