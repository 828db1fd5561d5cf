"""The time of a step: the schedule's own action lists with a clock, then gradients and optimizer."""

from __future__ import annotations

import dataclasses
import functools

from megatron.parallel.schedules import SCHEDULES, Compute, Forward, Timeline, bubble_fraction, simulate
from megatron.planner.cluster import Cluster
from megatron.planner.kernels import Both, Kernels
from megatron.planner.layout import Job, Layout, Program
from megatron.planner.memory import end_parameters, stage_parameters

# Bytes that pass between memory and processor for each parameter of an optimizer's step, in fp32: the gradient, twice
# (its norm first); master weight and two moments, read and written.
OPTIMIZER_BYTES = 4 * (2 + 2 * 3)
# After so many groups of microbatches, one for each stage, every further group takes the same time.
SETTLED = 2
# How often what a ring reduces and scatters, or gathers, passes between memory and processor: each element arrives and
# is read; then it is added to one that is read too, or kept.
RING_MOVES = 3
# Share of a GPU's processors that move what is communicated, and compute nothing meanwhile: 20 of 132 fill its links
# (2412.19437 section 3.2.2).
BUSY_LINKS = 20 / 132


@dataclasses.dataclass(frozen=True)
class Step:
    """The seconds of a step, and what the busiest stage spends them on.

    Attributes:
        products, elements, tensor: of its layers, as of `Spent`; what recomputation adds is among them, and
            `recompute` by itself.
        ends: embeddings, output layer and loss, as far as it has them.
        transfers: to and from other stages, where a stage waits for them.
        bubble: it has nothing to do.
        gradients: reduction over replicas and gathering of weights, as far as nothing hides them.
        optimizer: the update.
    """

    seconds: float
    products: float
    elements: float
    tensor: float
    recompute: float
    ends: float
    transfers: float
    bubble: float
    gradients: float
    optimizer: float


def _total(both: Both) -> float:
    return both.forward.total + both.backward.total


class Simulator:
    """A job in a layout: the durations of its computes, and from them of a step."""

    def __init__(self, job: Job, layout: Layout, cluster: Cluster, program: Program) -> None:
        self.job, self.layout, self.cluster, self.program = job, layout, cluster, program
        self.kernels = Kernels(job, layout, cluster, program)
        self.microbatches = layout.microbatches(job)
        alone = layout.pipeline * layout.chunks == 1
        self.first = self.kernels.chunk(first=True, last=alone)
        self.middle = self.kernels.chunk(first=False, last=False)
        self.last = self.first if alone else self.kernels.chunk(first=False, last=True)
        # A chunk's gradients are read, and with those of the microbatches before read and written.
        moved = self._parameters / layout.chunks * (cluster.device.element + 2 * program.gradient)
        self.accumulation = moved / self._stream
        self.transfer = self._transfer()

    @property
    def _stream(self) -> float:
        """Bytes/s of what passes over all parameters."""
        return self.cluster.device.bandwidth * self.cluster.reached.stream

    @functools.cached_property
    def _parameters(self) -> float:
        """Of the first stage, which has the most: the last has no table of positions."""
        return stage_parameters(self.job, self.layout, 0)

    def _transfer(self) -> float:
        """From a stage to the next. What all tensor-parallel processes hold alike is sent in parts and put together
        again (2104.04473 section 4.1); with sequence parallelism each has its part alone."""
        layout, cluster = self.layout, self.cluster
        if layout.pipeline == 1:
            return 0.0
        element = self.job.residual_element(cluster.device.element)
        size = self.kernels.tokens * self.job.model.hidden_size * element
        if layout.sequence_parallel:
            return cluster.send(size / layout.tensor)
        if layout.scatter_gather and layout.tensor > 1:
            return cluster.send(size / layout.tensor) + cluster.all_gather(size, layout.tensor_group(cluster))
        return cluster.send(size)

    def part(self, rank: int, chunk: int) -> Both:
        """The time of one chunk and microbatch, transfers and accumulation aside."""
        if rank == chunk == 0:
            return self.first
        at_end = rank == self.layout.pipeline - 1 and chunk == self.layout.chunks - 1
        return self.last if at_end else self.middle

    def duration(self, rank: int, action: Compute) -> float:
        """How long a stage is busy with one compute."""
        waited = self.transfer if self.program.waits else 0.0
        part = self.part(rank, action.chunk)
        if isinstance(action, Forward):
            return part.forward.total + waited
        return part.backward.total + self.accumulation + waited

    def timeline(self, microbatches: int) -> Timeline:
        """When each rank of the pipeline computes what, by the schedule's action lists."""
        layout = self.layout
        schedule = SCHEDULES[layout.schedule](layout.pipeline, layout.chunks, microbatches)
        transfer = 0.0 if self.program.waits else self.transfer
        return simulate(schedule, layout.pipeline, self.duration, transfer)

    def pipeline_seconds(self) -> float:
        """From the first forward to the last backward. Of many microbatches only the first groups are walked: after
        `SETTLED` of them each further one adds the same."""
        m, stages = self.microbatches, self.layout.pipeline
        if stages == 1:
            return m * self.busiest[1]
        walked = (SETTLED + 1) * stages + m % stages
        if m <= walked:
            return self.timeline(m).makespan
        longer, shorter = (self.timeline(n).makespan for n in (walked, walked - stages))
        return longer + (m - walked) / stages * (longer - shorter)

    @functools.cached_property
    def busiest(self) -> tuple[float, float]:
        """Seconds for a microbatch on the stage that has the most to do, first or last: those of embeddings, output
        layer and loss, and all."""
        layout = self.layout
        layers = layout.chunks * _total(self.middle)
        ends = max(
            sum(_total(self.part(rank, chunk)) for chunk in range(layout.chunks)) - layers
            for rank in {0, layout.pipeline - 1}
        )
        waited = 2 * self.transfer if self.program.waits else 0.0
        return ends, layers + ends + layout.chunks * (self.accumulation + waited)

    def estimate(self) -> float:
        """About `step().seconds`, by the formula of the bubble in place of the clock."""
        m, layout = self.microbatches, self.layout
        bubble = bubble_fraction(layout.pipeline, layout.chunks, m)
        return m * self.busiest[1] * (1 + bubble) + self.gradients() + self.optimizer()

    def gradients(self) -> float:
        """Reduction over replicas and between tied embeddings, and gathering of weights, as far as nothing hides
        them."""
        job, layout, cluster = self.job, self.layout, self.cluster
        group, element = layout.data_group(cluster), cluster.device.element
        exchange = cluster.all_gather if layout.distributed_optimizer else cluster.all_reduce
        reduce = exchange(self._parameters * self.program.gradient, group)
        gather = (
            cluster.all_gather(self._parameters * element, group) if layout.distributed_optimizer else 0.0
        )
        tied = 0.0
        if layout.pipeline > 1 and not job.model.untie_embeddings_and_output_weights:
            table = job.padded_vocab_size(layout.tensor) / layout.tensor * job.model.hidden_size
            ends = cluster.group(2, layout.processes - layout.processes // layout.pipeline)
            tied = cluster.all_reduce(self.program.gradient * table, ends)
        if layout.overlap_grad_reduce and layout.data > 1:
            reduce = self._exposed(reduce)
        return reduce + gather + tied

    def _exposed(self, reduce: float) -> float:
        """Of the seconds of a reduction beside the last backward of each chunk, what adds to the step.

        The gradient of the embeddings is complete when backward ends. And what is hidden on the links is not in
        memory, which the operations of backward pass through at the same time, nor on the processors.
        """
        layout = self.layout
        last = end_parameters(self.job, layout.tensor, first=True, last=False) / self._parameters
        hidden = min(layout.chunks * self.middle.backward.total, (1 - last) * reduce)
        halves = 1 if layout.distributed_optimizer else 2
        moved = halves * RING_MOVES * self.program.gradient * self._parameters / self._stream
        processors = BUSY_LINKS if self.cluster.device.sms > 1 else 0.0
        return reduce - hidden + (moved / reduce + processors) * hidden

    def optimizer(self) -> float:
        """The update of what this replica owns."""
        owned = self._parameters / (self.layout.data if self.layout.distributed_optimizer else 1)
        element = self.cluster.device.element
        copied = 0 if element == 4 else element  # master weights of fp32 are the weights
        return owned * (OPTIMIZER_BYTES + copied) / self._stream

    def step(self) -> Step:
        """Predict a step."""
        layout, m = self.layout, self.microbatches
        pipeline, (ends, busy) = self.pipeline_seconds(), self.busiest
        spent = (self.middle.forward + self.middle.backward) * (layout.chunks * m)
        again = {"none": 0.0, "selective": self.kernels.attention.forward.total}.get(
            layout.recompute, self.kernels.layer.forward.total
        )
        gradients, optimizer = self.gradients(), self.optimizer()
        return Step(
            seconds=pipeline + gradients + optimizer,
            products=spent.products,
            elements=spent.elements + self.accumulation * layout.chunks * m,
            tensor=spent.tensor,
            recompute=again * layout.layers_per_chunk(self.job) * layout.chunks * m,
            ends=ends * m,
            transfers=2 * layout.chunks * m * self.transfer if self.program.waits else 0.0,
            bubble=pipeline - m * busy,
            gradients=gradients,
            optimizer=optimizer,
        )
