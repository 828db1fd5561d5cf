"""Memory of passes whose backward is split: the most that a stage holds while one of them runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from megatron.parallel.schedules import BackwardWeight, Forward
from megatron.planner.held import Held, Pass
from megatron.planner.host_copies import Returning


@dataclasses.dataclass(frozen=True)
class ChunkMemory:
    """Bytes that a chunk holds of a microbatch.

    Attributes:
        kept: from its forward pass to its backward pass.
        waiting: from there to its weight gradients.
        forward, backward: the most within a forward pass, and within a backward pass.
        left: of a last layer that goes to host memory, from its forward pass to the stage's next one.
    """

    kept: float
    waiting: float
    forward: float
    backward: float
    left: float

    @classmethod
    def make(
        cls,
        *,
        kept: float,
        waiting: float,
        layer: tuple[float, float],
        working: float,
        forward: float,
        back: Returning,
    ) -> ChunkMemory:
        """Backward goes through the layers, which then wait.

        Its most is in the first layer, in the last one, or where two that were in host memory are left.

        Args:
            layer: what one layer keeps, and what waits of it.
            working: what backward of a layer needs beside these.
            forward: what forward needs beside `kept`.
            back: what is on the device of layers whose activations go to host memory.
        """
        last_layer = waiting - layer[1] + layer[0]
        before_it = waiting - 2 * layer[1] + back.at_once if back.at_once > back.of_layer else 0.0
        most = max(kept + back.at_end, last_layer, before_it)
        return cls(kept, waiting, kept + forward, most + working, back.left)


def peak(moments: Iterable[tuple[Pass, int | None, Held]], chunks: Sequence[ChunkMemory]) -> float:
    """Return the most bytes that a stage holds in any pass.

    A moment is a pass, the chunk of the last forward pass before it (None without offload), and what other microbatches
    hold.
    """
    of_each = [*(chunk.kept for chunk in chunks), *(chunk.waiting for chunk in chunks)]
    most = 0.0
    for (kind, number), before, held in moments:
        chunk = chunks[number]
        own = (
            chunk.forward if kind is Forward else chunk.waiting if kind is BackwardWeight else chunk.backward
        )
        if kind is not Forward and before is not None and sum(held[: len(chunks)]) > 0:
            own += chunks[before].left
        most = max(most, own + sum(number * bytes_ for number, bytes_ in zip(held, of_each, strict=True)))
    return most
