"""Facts about mixtures of experts that the formats of several programs need."""

from __future__ import annotations

import itertools
from collections.abc import Iterable


def layer_freq(has_experts: Iterable[bool]) -> str:
    """The shortest --moe-layer-freq for layers with and without experts."""
    layers = list(has_experts)
    if all(layers):
        return "1"
    runs = [(int(bit), len(list(run))) for bit, run in itertools.groupby(layers)]
    return "+".join(f"[{bit}]*{length}" for bit, length in runs)
