"""The time of a step: the schedule's own action lists with a clock, then gradients and optimizer."""

from __future__ import annotations

import dataclasses

from megatron.parallel.schedules import SCHEDULES, Compute, Forward, Timeline, simulate
from megatron.planner.cluster import Cluster
from megatron.planner.kernels import Both, Kernels
from megatron.planner.layout import Job, Layout, Program
from megatron.planner.memory import stage_parameters

# Bytes that pass between memory and processor for each parameter of an optimizer's step, all fp32: the gradient,
# twice (its norm first), master weight and moments, read and written; and the new weight.
OPTIMIZER_MOVES = 4 * (2 + 2 * 3)
# Groups of so many microbatches, one for each stage, after which every further one takes the same time.
SETTLED = 3


@dataclasses.dataclass(frozen=True)
class Step:
    """A step of a layout, in seconds on the stage that takes the longest.

    Attributes:
        seconds: of the whole step.
        products, elements, tensor: computation of the busiest stage, as of `Spent`; `recompute` is the part of it
            that recomputation adds.
        transfers: of that stage, as far as they are waited for.
        bubble: it waits for other stages.
        gradients: reduction over replicas and gathering of weights, as far as they are not hidden.
        optimizer: the update.
    """

    seconds: float
    products: float
    elements: float
    tensor: float
    recompute: float
    transfers: float
    bubble: float
    gradients: float
    optimizer: float


class Stages:
    """The durations of every compute of a layout."""

    def __init__(self, job: Job, layout: Layout, cluster: Cluster, program: Program) -> None:
        self.job, self.layout, self.cluster, self.program = job, layout, cluster, program
        kernels = Kernels(job, layout, cluster, program)
        self.kernels = kernels
        self.middle = kernels.chunk(first=False, last=False)
        alone = layout.pipeline * layout.chunks == 1
        self.first = kernels.chunk(first=True, last=alone)
        self.last = kernels.chunk(first=alone, last=True)
        self.accumulation = self._accumulation()
        self.transfer = self._transfer()

    def part(self, rank: int, chunk: int) -> Both:
        """The time of a chunk of a stage, transfers aside."""
        if rank == chunk == 0:
            return self.first
        if rank == self.layout.pipeline - 1 and chunk == self.layout.chunks - 1:
            return self.last
        return self.middle

    def duration(self, rank: int, action: Compute) -> float:
        """How long a stage is busy with one compute."""
        waited = self.transfer if self.program.waits else 0.0
        part = self.part(rank, action.chunk)
        if isinstance(action, Forward):
            return part.forward.total + waited
        return part.backward.total + self.accumulation + waited

    def _accumulation(self) -> float:
        """Adding a chunk's gradients of a microbatch to those before: they are read, the sum is read and written."""
        parameters = stage_parameters(self.job, self.layout, 0) / self.layout.chunks
        moved = parameters * (self.cluster.device.element + 2 * self.program.gradient)
        return moved / (self.cluster.device.bandwidth * self.cluster.reached.memory)

    def _transfer(self) -> float:
        """From a stage to the next. What all tensor-parallel processes hold alike is sent in parts and put together
        again (2104.04473 section 4.1); with sequence parallelism each has its part alone."""
        layout, cluster = self.layout, self.cluster
        if layout.pipeline == 1:
            return 0.0
        size = self.kernels.tokens * self.job.model.hidden_size * cluster.device.element
        if layout.sequence_parallel:
            return cluster.send(size / layout.tensor)
        if layout.scatter_gather and layout.tensor > 1:
            gather = cluster.all_gather(size, layout.tensor_group(cluster))
            return cluster.send(size / layout.tensor) + gather
        return cluster.send(size)


def timeline(stages: Stages, microbatches: int) -> Timeline:
    """The computes of a step on all ranks of a pipeline."""
    layout = stages.layout
    schedule = SCHEDULES[layout.schedule](layout.pipeline, layout.chunks, microbatches)
    transfer = 0.0 if stages.program.waits else stages.transfer
    return simulate(schedule, layout.pipeline, stages.duration, transfer)


def pipeline_seconds(stages: Stages, microbatches: int) -> float:
    """Makespan of the schedule. After `SETTLED` groups of microbatches each further one adds the same, which is not
    walked."""
    layout = stages.layout
    if layout.pipeline == 1:
        both = stages.first
        return microbatches * (both.forward.total + both.backward.total + stages.accumulation)
    walked = (SETTLED + 1) * layout.pipeline + microbatches % layout.pipeline
    if microbatches <= walked:
        return timeline(stages, microbatches).makespan
    longer, shorter = (timeline(stages, m).makespan for m in (walked, walked - layout.pipeline))
    return longer + (microbatches - walked) / layout.pipeline * (longer - shorter)


def gradient_seconds(stages: Stages) -> tuple[float, float]:
    """Reduction of gradients over replicas, of tied embeddings, and gathering of weights: what all take, and what
    of it nothing hides."""
    job, layout, cluster = stages.job, stages.layout, stages.cluster
    group, element = layout.data_group(cluster), cluster.device.element
    parameters = stage_parameters(job, layout, 0)
    reduced = parameters * (4 if element == 4 else stages.program.gradient)
    if layout.distributed_optimizer:
        reduce = cluster.all_gather(reduced, group)
        gather = cluster.all_gather(parameters * element, group)
    else:
        reduce, gather = cluster.all_reduce(reduced, group), 0.0
    tied = 0.0
    if layout.pipeline > 1 and not job.model.untie_embeddings_and_output_weights:
        table = job.padded_vocab_size(layout.tensor) / layout.tensor * job.model.hidden_size
        stride = layout.processes // layout.pipeline * (layout.pipeline - 1)
        tied = cluster.all_reduce(4 * table, cluster.group(2, stride))
    hidden = 0.0
    if layout.overlap_grad_reduce:
        # Beside the last backward of each chunk, but for the bucket that is complete last.
        last = layout.chunks * stages.middle.backward.total
        hidden = min(last, 0.9 * reduce)
    return reduce + gather + tied, reduce + gather + tied - hidden


def step(job: Job, layout: Layout, cluster: Cluster, program: Program) -> Step:
    """Predict a step."""
    stages = Stages(job, layout, cluster, program)
    m = layout.microbatches(job)
    pipeline = pipeline_seconds(stages, m)
    # A stage that holds an end of the model is the busiest; with one stage it holds both.
    work = [[stages.part(rank, chunk) for chunk in range(layout.chunks)] for rank in {0, layout.pipeline - 1}]
    busiest = max(
        (sum(parts[1:], parts[0]) for parts in work),
        key=lambda both: both.forward.total + both.backward.total,
    )
    spent = (busiest.forward + busiest.backward) * m
    again = {"none": 0.0, "selective": stages.kernels.attention.forward.total}.get(
        layout.recompute, stages.kernels.layer.forward.total
    )
    accumulation = stages.accumulation * layout.chunks * m
    transfers = 2 * layout.chunks * m * stages.transfer if program.waits else 0.0
    _, gradients = gradient_seconds(stages)
    owned = stage_parameters(job, layout, 0) / (layout.data if layout.distributed_optimizer else 1)
    device = cluster.device
    optimizer = owned * (OPTIMIZER_MOVES + device.element) / (device.bandwidth * cluster.reached.memory)
    return Step(
        seconds=pipeline + gradients + optimizer,
        products=spent.products,
        elements=spent.elements + accumulation,
        tensor=spent.tensor,
        recompute=again * layout.layers_per_chunk(job) * layout.chunks * m,
        transfers=transfers,
        bubble=pipeline - spent.total - accumulation - transfers,
        gradients=gradients,
        optimizer=optimizer,
    )
