"""Memory of passes whose backward is split: the most that a stage holds while one of them runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from megatron.parallel.schedules import BackwardWeight, Forward
from megatron.planner.held import Held, Pass


@dataclasses.dataclass(frozen=True)
class ChunkMemory:
    """Bytes that a chunk holds of a microbatch.

    Attributes:
        kept: from its forward pass to its backward pass.
        waiting: from there to its weight gradients.
        forward, backward: the most within a forward pass, and within a backward pass.
    """

    kept: float
    waiting: float
    forward: float
    backward: float

    @classmethod
    def make(
        cls, *, kept: float, waiting: float, layer: tuple[float, float], working: float, forward: float
    ) -> ChunkMemory:
        """Backward goes through the layers, which then wait; its most is in the first layer or in the last one.

        Args:
            layer: what one layer keeps, and what waits of it.
            working: what backward of a layer needs beside these.
            forward: what forward needs beside `kept`.
        """
        last_layer = waiting - layer[1] + layer[0]
        return cls(kept, waiting, kept + forward, max(kept, last_layer) + working)


def peak(moments: Iterable[tuple[Pass, Held]], chunks: Sequence[ChunkMemory]) -> float:
    """The most bytes that a stage holds in any pass."""
    of_each = [*(chunk.kept for chunk in chunks), *(chunk.waiting for chunk in chunks)]
    most = 0.0
    for (kind, number), held in moments:
        chunk = chunks[number]
        own = (
            chunk.forward if kind is Forward else chunk.waiting if kind is BackwardWeight else chunk.backward
        )
        most = max(most, own + sum(number * bytes_ for number, bytes_ in zip(held, of_each, strict=True)))
    return most
