"""Offload to host memory in a plan: what leaves the device, and how long copies take."""

from __future__ import annotations

import functools

from megatron.performance.config import OffloadConfig
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


def returned_layers(job: Job, layout: Layout, stage: int, in_flight: float) -> int:
    """Layers of a stage, which has one chunk, that are back when its backward begins, beside those that stayed.

    A layer comes back before those that stayed have been freed. If none stayed, two come back, and in a pipeline the
    last layer of another microbatch is still there.
    """
    layers, leaving = leaving_layers(job, layout, stage, 0)
    if not leaving:
        return 0
    return 1 if leaving < layers else 2 + (in_flight > 1)


def piece_bytes(job: Job, layout: Layout, stage: int, state: float) -> float:
    """Bytes on the device of the pieces of an offloaded optimizer's `state`, those of all parameters of a rank."""
    owned = owned_parameters(job, layout, stage)
    largest = owned
    if layout.sharded_parameters:
        largest = largest_layer(job, layout, stage) / layout.shards
    return NUM_SLOTS * min(PIECE_SIZE, largest) * state / owned
