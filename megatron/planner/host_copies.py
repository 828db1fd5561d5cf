"""Offload to host memory in a plan: what leaves the device, and how long copies take."""

from __future__ import annotations

import dataclasses
import functools

from megatron.parallel.schedules import BackwardWeight, Forward
from megatron.performance.config import OffloadConfig
from megatron.planner.held import Held, Pass, counted_microbatches, most_held_after_forward
from megatron.planner.layout import Job, Layout
from megatron.planner.parameters import largest_layer, owned_parameters

# Elements of a piece, and pieces on the device at once, as in megatron/optim/offload.py.
PIECE_SIZE, NUM_SLOTS = 1 << 22, 3
# Share of a host's memory that a run can use. The rest is for the system, for reading data and for caches of files.
USABLE_HOST = 0.9


def leaving_layers(job: Job, layout: Layout, stage: int, chunk: int) -> tuple[int, int]:
    """Numbers of decoder layers of a chunk, and of those whose activations go to host memory."""
    layers = sum(layout.layers(job)[stage][chunk])
    last = layout.is_last(stage, chunk)
    decoder = layers - (job.model.mtp_num_layers if last else 0)
    if layout.offload_layers == 0:
        return decoder, 0
    return decoder, offload(layout.offload_layers).num_layers(decoder, last=last)


@functools.cache
def offload(number: int | None) -> OffloadConfig:
    """Offload of the activations of so many layers of each chunk; None for all but the model's last."""
    return OffloadConfig(cpu_offload_activations=True, cpu_offload_activations_num_layers=number)


def leaving_bytes(job: Job, layout: Layout, stage: int, chunk: int, kept: float) -> float:
    """Bytes of a microbatch's activations that a chunk copies to host memory, of those that its layers keep."""
    if layout.offload_layers == 0:
        return 0.0
    layers = sum(layout.layers(job)[stage][chunk])
    return kept * leaving_layers(job, layout, stage, chunk)[1] / layers if layers else 0.0


def input_stays(job: Job, layout: Layout, stage: int, chunk: int) -> bool:
    """Return True if a chunk keeps its input on the device although its layers' activations leave.

    An input from another chunk stays, because its gradient is sent back.
    """
    return leaving_layers(job, layout, stage, chunk)[1] > 0 and not layout.is_first(stage, chunk)


@dataclasses.dataclass(frozen=True)
class Returning:
    """Bytes of a chunk's activations that are on the device while they leave or come back.

    Attributes:
        at_end: when a forward pass ends, and when a backward pass begins. A layer is back before those that stayed have
            been freed; if none stayed, two come back.
        of_layer: of one layer that leaves.
        at_once: of the layers that are on the device once those that stayed have been freed.
        left: of the last layer, if it leaves, too: it is freed in the next forward pass of the stage.
    """

    at_end: float = 0.0
    of_layer: float = 0.0
    at_once: float = 0.0
    left: float = 0.0


def returning(job: Job, layout: Layout, stage: int, chunk: int, leaving: float) -> Returning:
    """Return what a chunk whose layers copy `leaving` bytes of a microbatch has on the device meanwhile."""
    layers, number = leaving_layers(job, layout, stage, chunk)
    if not number:
        return Returning()
    of_layer = leaving / number
    at_once = min(2, number) * of_layer
    if number == layers:
        return Returning(at_once, of_layer, at_once, of_layer)
    return Returning(of_layer, of_layer, at_once)


@dataclasses.dataclass(frozen=True)
class OffloadedActivations:
    """The most bytes that the layers of a stage keep at once.

    Attributes:
        forward, backward: on the device, when a forward pass ends and when a whole backward pass begins.
        host: in host memory.
    """

    forward: float
    backward: float
    host: float


def offloaded_activations(
    job: Job, layout: Layout, stage: int, stay: list[float], leaving: list[float]
) -> OffloadedActivations:
    """Count what a stage keeps with offload from the list of its passes.

    Args:
        stay, leaving: bytes of each chunk of a microbatch that stay on the device, and that go to host memory.
    """
    back = [returning(job, layout, stage, chunk, bytes_) for chunk, bytes_ in enumerate(leaving)]
    forward = backward = host = 0.0
    for (kind, chunk), before, held in moments_after_forward(job, layout, stage):
        own = kind is not BackwardWeight
        kept = [number + (own and i == chunk) for i, number in enumerate(held[: layout.chunks])]
        host = max(host, sum(number * of_chunk for number, of_chunk in zip(kept, leaving, strict=True)))
        bytes_ = sum(number * of_chunk for number, of_chunk in zip(kept, stay, strict=True))
        if kind is Forward:
            forward = max(forward, bytes_)
        elif kind is not BackwardWeight:
            left = 0.0 if before is None or sum(kept) == 1 else back[before].left
            backward = max(backward, bytes_ + back[chunk].at_end + left)
    return OffloadedActivations(forward, backward, host)


def moments_after_forward(job: Job, layout: Layout, stage: int) -> tuple[tuple[Pass, int | None, Held], ...]:
    """The fullest moments of a stage, for each kind of pass and each chunk of the last forward pass before it."""
    m = counted_microbatches(layout.schedule_name, layout.pipeline, layout.microbatches(job))
    return most_held_after_forward(layout.schedule(job), layout.pipeline, layout.chunks, m, stage)


def piece_bytes(job: Job, layout: Layout, stage: int, state: float) -> float:
    """Bytes on the device of the pieces of an offloaded optimizer's `state`, those of all parameters of a rank."""
    owned = owned_parameters(job, layout, stage)
    largest = owned
    if layout.sharded_parameters:
        largest = largest_layer(job, layout, stage) / layout.shards
    return NUM_SLOTS * min(PIECE_SIZE, largest) * state / owned
