"""Optimizer state and master weights in host memory (--cpu-offload-optimizer; arXiv 2101.06840 for the idea).

A step copies them to the device and back in pieces. While the device updates one piece, the next is on the way to it
and the one before is on the way back. The device computes all updates, with the arithmetic of the optimizer that this
one wraps, so that weights and state have the same bits as without offload.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron.errors import InputError
from megatron.ops.host_memory import CopyQueue, Event, host_zeros, point_of
from megatron.optim.spec import OptimizerSpec, Shard, StepInputs

# Elements of a piece: 16 MiB of each tensor, large enough for PCIe, and a multiple of any vector.
PIECE_SIZE = 1 << 22
# Pieces on the device at once: one arrives, one is updated, one leaves.
NUM_SLOTS = 3
# Name of the master weight beside those of the state.
WEIGHT = "weight"


@dataclasses.dataclass(frozen=True)
class Piece:
    """A piece of a shard.

    Attributes:
        number: index among all pieces of this rank.
        weight, grad, state: as in `Shard`.
        param: the parameter; None if the weight itself is the parameter, which is on the device.
    """

    number: int
    weight: Tensor
    grad: Tensor
    state: dict[str, Tensor]
    param: Tensor | None

    @property
    def on_host(self) -> dict[str, Tensor]:
        """The tensors in host memory, by name."""
        return self.state if self.param is None else self.state | {WEIGHT: self.weight}


@dataclasses.dataclass
class Slot:
    """Memory of the device for one piece.

    Attributes:
        tensors: [PIECE_SIZE] or less, by name.
        free: the point from which on they may be overwritten.
    """

    tensors: dict[str, Tensor]
    free: Event


class Offloaded(OptimizerSpec):
    """An optimizer whose state is in host memory. It must update elements independently of each other."""

    on_host = True

    def __init__(self, inner: OptimizerSpec) -> None:
        """Raises `InputError` if the optimizer does more than to update elements."""
        for name in ("arrange", "divide", "prepare"):
            if getattr(type(inner), name) is not getattr(OptimizerSpec, name):
                raise InputError(
                    f"--cpu-offload-optimizer updates pieces of weights, and {type(inner).__name__} has a `{name}` of "
                    "its own; leave the flag out"
                )
        self.inner, self.state, self.counts = inner, inner.state, inner.counts
        self.num_pieces = self.slot_size = 0
        self.slots: list[Slot] = []
        self.to_device: CopyQueue
        self.to_host: CopyQueue

    def updates(self, name: str, p: nn.Parameter) -> bool:
        return self.inner.updates(name, p)

    def allocate(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return host_zeros(size, dtype, device)

    def divide(self, shard: Shard, bucket: Any, tp: Any) -> Sequence[Piece]:
        """Divide into pieces of `PIECE_SIZE`, and allocate memory of the device for them."""
        pieces = list(pieces_of(shard, first=self.num_pieces))
        self.num_pieces += len(pieces)
        if pieces and len(pieces[0].grad) > self.slot_size:
            self._allocate_slots(pieces[0])
        return pieces

    def _allocate_slots(self, piece: Piece) -> None:
        """Allocate slots for pieces of this size."""
        self.slot_size, device = len(piece.grad), piece.grad.device
        if not self.slots:
            self.to_device, self.to_host = CopyQueue(device), CopyQueue(device)
        self.slots.clear()
        for _ in range(NUM_SLOTS):
            tensors = {name: x.new_empty(len(x), device=device) for name, x in piece.on_host.items()}
            self.slots.append(Slot(tensors, point_of(device)))

    def step(self, shards: Sequence[Piece], inputs: StepInputs) -> None:
        for piece in shards:
            self._update(piece, inputs)

    def _update(self, piece: Piece, inputs: StepInputs) -> None:
        # A piece always has the same slot, so that it is loaded after it was stored by the step before.
        slot, on_host = self.slots[piece.number % NUM_SLOTS], piece.on_host
        here = {name: x[: len(piece.grad)] for name, x in slot.tensors.items()}
        self.to_device.copy([(here[name], x) for name, x in on_host.items()], [slot.free]).wait()
        weight = here.get(WEIGHT, piece.weight)
        self.inner.step([Shard(weight, piece.grad, {name: here[name] for name in piece.state})], inputs)
        if piece.param is not None:
            piece.param.copy_(weight)
        updated = point_of(piece.grad.device)
        slot.free = self.to_host.copy([(x, here[name]) for name, x in on_host.items()], [updated])

    def finish(self) -> None:
        if self.slots:
            self.to_host.synchronize()


def pieces_of(shard: Shard, *, first: int) -> Iterator[Piece]:
    """Divide a shard into pieces of `PIECE_SIZE` elements, numbered from `first`; the last may have fewer."""
    for number, begin in enumerate(range(0, len(shard.grad), PIECE_SIZE), start=first):
        part = slice(begin, begin + PIECE_SIZE)
        state = {name: x[part] for name, x in shard.state.items()}
        param = None if shard.param is None or shard.param is shard.weight else shard.param[part]
        yield Piece(number, shard.weight[part], shard.grad[part], state, param)
