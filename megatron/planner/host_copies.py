"""Offload to host memory in a plan: what leaves the device, what a step copies, and how long that takes."""

from __future__ import annotations

import dataclasses

from megatron.errors import InputError
from megatron.optim.offload import NUM_SLOTS, PIECE_SIZE
from megatron.performance.config import OffloadConfig
from megatron.planner.cluster import Cluster
from megatron.planner.layout import Job, Layout
from megatron.planner.memory import (
    Memory,
    backward_of_a_layer,
    layer_activations,
    loss_working,
    max_in_flight,
    recomputed_experts,
    stage_memory,
)
from megatron.planner.our_program import our_program, simulator_of
from megatron.planner.parameters import largest_layer, owned_parameters
from megatron.planner.search import Plan
from megatron.planner.units import sharded_units
from megatron.training.config import RunConfig

# Bytes/s in each direction of a device's link to its host, by the beginning of the planner's name: NVLink-C2C, PCIe of
# 16 lanes of generations 5 and 3. That of others is PCIe 4.
C2C, PCIE5, PCIE4, PCIE3 = 450e9, 64e9, 32e9, 16e9
LINKS = {
    C2C: ("gh200", "gb200", "gb300"),
    PCIE5: ("h100", "h200", "h800", "h20", "b200", "b300", "mi300x", "rtx-pro", "rtx-5090"),
    PCIE3: ("v100", "t4"),
}
# Share of it that large copies from pinned memory reach: assumed, not measured.
HOST_EFFICIENCY = 0.8


@dataclasses.dataclass(frozen=True)
class HostCopies:
    """Offload of the process that needs the most memory of its device.

    Attributes:
        memory: bytes in its host's memory.
        optimizer, activations: bytes that a step copies in each direction, which have streams of their own.
        bandwidth: bytes/s in each direction.
        waits: seconds that a step waits for copies of activations.
    """

    memory: float
    optimizer: float
    activations: float
    bandwidth: float
    waits: float

    def __str__(self) -> str:
        copies = ", ".join(
            f"{words} {size / 1e9:.3g} GB in {size / self.bandwidth:.2g} s"
            for words, size in (("optimizer", self.optimizer), ("activations", self.activations))
            if size
        )
        waits = f"; passes wait {self.waits:.2g} s" if self.activations else ""
        return (
            f"  host    {self.memory / 1e9:.3g} GB in host memory; copies in each direction, at "
            f"{self.bandwidth / 1e9:.3g} GB/s: {copies or 'none'}{waits}"
        )


def host_bandwidth(name: str) -> float:
    """Bytes/s in each direction that a device reaches to its host, by the planner's name of the device."""
    links = (link for link, names in LINKS.items() if name.lower().startswith(names))
    return HOST_EFFICIENCY * next(links, PCIE4)


def with_offload(
    plan: Plan, run: RunConfig, job: Job, cluster: Cluster
) -> tuple[Plan, HostCopies] | tuple[Plan, None]:
    """Add the offload of a run to the plan of its layout.

    Raises:
        InputError: the activations of its schedule are not planned.
    """
    offload, layout = run.plugin(OffloadConfig), plan.layout
    state = run.optimizer.cpu_offload_optimizer
    if not (state or offload.cpu_offload_activations):
        return plan, None
    schedule = run.parallel.pipeline_schedule
    if offload.cpu_offload_activations and schedule != "1f1b":
        raise InputError(
            f"--cpu-offload-activations: with --pipeline-schedule {schedule} it is not planned; a dry run counts it"
        )
    bandwidth, step = host_bandwidth(cluster.device.name), plan.step
    stages = [Stage(job, layout, cluster, stage, offload) for stage in layout.distinct_stages(job)]
    memories = [stage.memory(offload_state=state) for stage in stages]
    memory = max(memories, key=lambda memory: memory.total)
    largest = stages[memories.index(memory)]
    # Stages before and after the slowest wait for its first and last microbatch.
    waits = (layout.microbatches(job) + layout.pipeline - 1) * max(stage.waits(bandwidth) for stage in stages)
    copied = largest.state if state else 0.0
    optimizer = max(step.optimizer, copied / bandwidth)
    seconds = step.seconds + waits + optimizer - step.optimizer
    step = dataclasses.replace(step, seconds=seconds, optimizer=optimizer)
    copies = HostCopies(
        memory=copied + largest.held,
        optimizer=copied,
        activations=layout.microbatches(job) * largest.leaving * largest.layer,
        bandwidth=bandwidth,
        waits=waits,
    )
    return Plan(layout, step, memory), copies


class Stage:
    """A pipeline stage with offload.

    Attributes:
        state: bytes of master weights and moments.
        layer: bytes that a layer keeps of a microbatch, the mean.
        layers, leaving: its layers, and those that are offloaded.
        in_flight: microbatches whose activations it keeps.
        held: bytes of activations in host memory at their peak.
    """

    def __init__(
        self, job: Job, layout: Layout, cluster: Cluster, stage: int, offload: OffloadConfig
    ) -> None:
        self.job, self.layout, self.cluster, self.stage = job, layout, cluster, stage
        self.program = our_program(job, layout, cluster)
        self.whole = stage_memory(job, layout, cluster, stage, self.program)
        self.state = self.whole.master + self.whole.moments
        self.chunks = layout.layers(job)[stage]
        numbers = []
        for chunk, layers in enumerate(self.chunks):
            last = stage == layout.pipeline - 1 and chunk == layout.chunks - 1
            decoder = sum(layers) - (job.model.mtp_num_layers if last else 0)
            numbers.append((decoder, offload.num_layers(decoder, last=last)))
        self.numbers = numbers
        self.layers, self.leaving = (sum(column) for column in zip(*numbers, strict=True))
        element, recompute = cluster.device.element, layout.recompute
        kept = sum(
            number
            * layer_activations(job, layout, element, self.program, recompute=recompute, has_experts=experts)
            for chunk in self.chunks
            for experts, number in zip((False, True), chunk, strict=True)
        )
        self.layer = kept / sum(map(sum, self.chunks))
        self.in_flight = max_in_flight(layout, layout.microbatches(job), stage) / layout.chunks
        self.held = self.in_flight * self.leaving * self.layer

    @property
    def working(self) -> tuple[float, float]:
        """Bytes that backward of a layer and the loss need beside what layers keep, as in `stage_memory`."""
        job, layout, element, program = self.job, self.layout, self.cluster.device.element, self.program
        has_experts = any(experts for _, experts in self.chunks)
        units = sharded_units(job, layout, self.stage, element, program)
        backward = recomputed_experts(job, layout, element, program) if has_experts else 0.0
        backward = units.first_backward + (backward or backward_of_a_layer(job, layout, element))
        if self.stage < layout.pipeline - 1:
            return backward, 0.0
        loss = loss_working(job, layout, element, program) + units.loss
        return backward, max(loss, units.after_loss)

    def memory(self, *, offload_state: bool) -> Memory:
        """Memory of the device. `moments` has the pieces that the optimizer updates."""
        memory = self.whole
        if offload_state:
            owned = owned_parameters(self.job, self.layout, self.stage)
            largest = owned
            if self.layout.sharded_parameters:
                largest = largest_layer(self.job, self.layout, self.stage) / self.layout.shards
            slots = NUM_SLOTS * min(PIECE_SIZE, largest) * self.state / owned
            memory = dataclasses.replace(memory, master=0, moments=slots)
        if self.leaving:
            # When backward begins, a layer comes back before those that stayed have been freed. If none stayed, two
            # come back, and in a pipeline the last layer of another microbatch is still there.
            here = 1 if self.leaving < self.layers else 2 + (self.in_flight > 1)
            backward, loss = self.working
            more = max(loss, backward + here * self.layer) - max(loss, backward)
            saved = max(0.0, self.held - more)
            memory = dataclasses.replace(memory, activations=memory.activations - saved)
        return memory

    def waits(self, bandwidth: float) -> float:
        """Seconds that the passes of a microbatch wait for copies: those beyond the time of the chunk's layers."""
        kernels = simulator_of(self.job, self.layout, self.cluster).kernels
        waits = 0.0
        for (dense, experts), (_, leaving) in zip(self.chunks, self.numbers, strict=True):
            cost = kernels.chunk(dense, experts, first=False, last=False)
            copy = leaving * self.layer / bandwidth
            waits += max(0.0, copy - cost.forward.total) + max(0.0, copy - cost.backward.total)
        return waits
