"""Offload to host memory in a plan: what leaves the device, and how long copies take."""

from __future__ import annotations

import dataclasses
import functools

from megatron.parallel.schedules import Backward, Forward
from megatron.performance.config import OffloadConfig
from megatron.planner.held import counted_microbatches, most_held_after_forward
from megatron.planner.layout import Job, Layout
from megatron.planner.parameters import largest_layer, owned_parameters

# Elements of a piece, and pieces on the device at once, as in megatron/optim/offload.py.
PIECE_SIZE, NUM_SLOTS = 1 << 22, 3
# Share of a host's memory that a run can use. The rest is for the system, for reading data and for caches of files.
USABLE_HOST = 0.9
# Schedules for which the memory of offloaded activations is known.
OFFLOADING = ("1f1b", "interleaved")


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


@dataclasses.dataclass(frozen=True)
class OffloadedActivations:
    """The most bytes that the layers of a stage keep at once.

    Attributes:
        forward, backward: on the device, when a forward pass ends and when a backward pass begins.
        host: in host memory.
    """

    forward: float
    backward: float
    host: float


def offloaded_activations(
    job: Job, layout: Layout, stage: int, stay: list[float], leaving: list[float]
) -> OffloadedActivations:
    """Count what a stage keeps with offload from the list of its passes.

    A layer is back before those that stayed have been freed; if none stayed, two come back. If all layers of a chunk
    leave, the memory of its last one is freed in the next forward pass.

    Args:
        stay, leaving: bytes of each chunk of a microbatch that stay on the device, and that go to host memory.
    """
    chunks = range(layout.chunks)
    numbers = [leaving_layers(job, layout, stage, chunk) for chunk in chunks]
    of_layer = [bytes_ / max(1, left) for bytes_, (_, left) in zip(leaving, numbers, strict=True)]
    leaves_whole = [0 < left == layers for layers, left in numbers]
    returned = [
        of_layer[chunk] * (min(2, left) if leaves_whole[chunk] else left > 0)
        for chunk, (_, left) in enumerate(numbers)
    ]
    m = counted_microbatches(layout.schedule_name, layout.pipeline, layout.microbatches(job))
    most = {Forward: 0.0, Backward: 0.0}
    host = 0.0
    for (kind, chunk), before, held in most_held_after_forward(
        layout.schedule(job), layout.pipeline, layout.chunks, m, stage
    ):
        kept = [number + (i == chunk) for i, number in enumerate(held[: layout.chunks])]
        bytes_ = sum(number * of_chunk for number, of_chunk in zip(kept, stay, strict=True))
        if kind is Backward:
            bytes_ += returned[chunk]
            if before is not None and leaves_whole[before] and sum(kept) > 1:
                bytes_ += of_layer[before]
        most[kind] = max(most[kind], bytes_)
        host = max(host, sum(number * of_chunk for number, of_chunk in zip(kept, leaving, strict=True)))
    return OffloadedActivations(most[Forward], most[Backward], host)


def piece_bytes(job: Job, layout: Layout, stage: int, state: float) -> float:
    """Bytes on the device of the pieces of an offloaded optimizer's `state`, those of all parameters of a rank."""
    owned = owned_parameters(job, layout, stage)
    largest = owned
    if layout.sharded_parameters:
        largest = largest_layer(job, layout, stage) / layout.shards
    return NUM_SLOTS * min(PIECE_SIZE, largest) * state / owned
