"""Time of a step: the schedule's action lists run with a clock, then gradient reduction and the optimizer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import numpy as np

from megatron.parallel.schedules import Compute, Forward, Timeline, simulate
from megatron.planner.cluster import Cluster, Group
from megatron.planner.costs import ForwardBackward
from megatron.planner.kernels import Kernels
from megatron.planner.layout import Job, Layout
from megatron.planner.memory import (
    end_parameters,
    owned_parameters,
    stage_expert_parameters,
    stage_parameters,
)
from megatron.planner.pipeline_clock import pipeline_makespan
from megatron.planner.programs import Program

# Bytes per parameter that an optimizer step reads and writes in fp32: the gradient twice (its norm comes first), and
# master weight and two moments, each read and written.
OPTIMIZER_BYTES = 4 * (2 + 2 * 3)
# Groups of microbatches (one per stage) after which every further group takes the same time.
WARMUP_GROUPS = 2
# Memory accesses per element of a ring reduce-scatter or all-gather: it arrives and is read; then it is added to
# another one, which is read, or stored.
RING_ACCESSES = 3


@dataclasses.dataclass(frozen=True)
class Step:
    """Seconds of a step, and those of the busiest stage by kind of work.

    Attributes:
        matmul, elementwise, tensor_parallel, expert_parallel, context_parallel, host: of its layers (see `Cost`),
            recomputation included; `recompute` is that part alone.
        ends: embedding, output layer and loss.
        transfers: waiting for transfers to and from other stages.
        bubble: idle.
        gradients: gradient reduction over replicas and parameter all-gathers, where nothing hides them.
        optimizer: the update.
    """

    seconds: float
    matmul: float
    elementwise: float
    tensor_parallel: float
    expert_parallel: float
    context_parallel: float
    host: float
    recompute: float
    ends: float
    transfers: float
    bubble: float
    gradients: float
    optimizer: float


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Communication among replicas in a step. Times are in seconds.

    Attributes:
        name: in words.
        seconds: on the links.
        hidden: part of it beside computation.
        exposed: what it adds to the step: the rest, and what the hidden part takes from computation.
        beside: the pass, forward or backward, beside which it runs for each microbatch; None at the end of the step.
    """

    name: str
    seconds: float
    hidden: float
    exposed: float
    beside: str | None = None


class Simulator:
    """Durations of a job's computations in a layout, and of a step."""

    def __init__(
        self, job: Job, layout: Layout, cluster: Cluster, program: Program, kernels: Kernels | None = None
    ) -> None:
        self.job, self.layout, self.cluster, self.program = job, layout, cluster, program
        self.kernels = kernels or Kernels(job, layout, cluster, program)
        self.microbatches = layout.microbatches(job)
        self.stages, self.chunk_layers = layout.distinct_stages(job), layout.layers(job)
        # A microbatch's gradients of a chunk are read, and the accumulated gradients read and written.
        size = self._parameters / layout.chunks * (cluster.device.element + 2 * program.gradient)
        self.accumulation = size / (self._stream_bandwidth * cluster.efficiency.accumulate)
        self.transfer = self._transfer()

    @property
    def _stream_bandwidth(self) -> float:
        """Bytes/s of a pass over all parameters."""
        return self.cluster.device.bandwidth * self.cluster.efficiency.stream

    @functools.cached_property
    def _parameters(self) -> float:
        """Parameters of the stage that has the most."""
        return stage_parameters(self.job, self.layout, self._largest_stage)

    @functools.cached_property
    def _largest_stage(self) -> int:
        return max(self.stages, key=lambda stage: stage_parameters(self.job, self.layout, stage))

    def _transfer(self) -> float:
        """Seconds from one stage to the next.

        Tensor-parallel ranks hold equal activations, so each sends a slice, and the receivers all-gather them
        (2104.04473 section 4.1). With sequence parallelism each rank holds its own slice.
        """
        layout, cluster = self.layout, self.cluster
        if layout.pipeline == 1:
            return 0.0
        element = self.job.residual_element(cluster.device.element)
        size, group = (
            self.kernels.tokens * self.job.model.hidden_size * element,
            layout.pipeline_group(cluster),
        )
        if layout.sequence_parallel:
            return cluster.send(size / layout.tensor, group)
        if layout.scatter_gather and layout.tensor > 1:
            gather = cluster.all_gather(size, layout.tensor_group(cluster))
            return cluster.send(size / layout.tensor, group) + gather
        return cluster.send(size, group)

    def chunk(self, rank: int, chunk: int) -> ForwardBackward:
        """Cost of a chunk on one microbatch, without transfers and gradient accumulation."""
        dense, experts = self.chunk_layers[rank][chunk]
        last = rank == self.layout.pipeline - 1 and chunk == self.layout.chunks - 1
        return self.kernels.chunk(dense, experts, first=rank == chunk == 0, last=last)

    @functools.cached_property
    def layers(self) -> ForwardBackward:
        """Layers of all chunks of the stage whose layers take the longest, on one microbatch."""
        return max((self._layers(stage) for stage in self.stages), key=lambda layers: layers.total)

    def _layers(self, stage: int) -> ForwardBackward:
        dense, experts = (sum(numbers) for numbers in zip(*self.chunk_layers[stage], strict=True))
        return self.kernels.chunk(dense, experts, first=False, last=False)

    def chunk_seconds(self, rank: int, chunk: int) -> tuple[float, float]:
        """Seconds of `chunk`, forward and backward, and of accumulating its gradients in backward."""
        dense, experts = self.chunk_layers[rank][chunk]
        last = rank == self.layout.pipeline - 1 and chunk == self.layout.chunks - 1
        forward, backward = self.kernels.chunk_seconds(dense, experts, first=rank == chunk == 0, last=last)
        return forward, backward + self.accumulation

    def duration(self, rank: int, action: Compute) -> float:
        """Seconds that a compute keeps a stage busy."""
        transfer = self.transfer if self.program.blocking_transfers else 0.0
        chunk = self.chunk(rank, action.chunk)
        if isinstance(action, Forward):
            return chunk.forward.total + transfer
        return chunk.backward.total + self.accumulation + transfer

    def timeline(self, microbatches: int) -> Timeline:
        """Start and end of each rank's computes, by the schedule's action lists."""
        layout = self.layout
        schedule = layout.schedule(layout.pipeline, layout.chunks, microbatches)
        transfer = 0.0 if self.program.blocking_transfers else self.transfer
        return simulate(schedule, layout.pipeline, self.duration, transfer)

    def pipeline_seconds(self) -> float:
        """Seconds from the first forward to the last backward.

        Of many microbatches only the first groups are simulated: after `WARMUP_GROUPS` each further one adds the same.
        """
        m, stages = self.microbatches, self.layout.pipeline
        if stages == 1:
            return m * self.busiest[1]
        simulated = (WARMUP_GROUPS + 1) * stages + m % stages
        if m <= simulated:
            return self._makespan(m)
        longer, shorter = self._makespan(simulated), self._makespan(simulated - stages)
        # A slow stage may not yet hold up the others in the simulated groups, but it does in the end.
        return max(self.pipeline_bound(), longer + (m - simulated) / stages * (longer - shorter))

    def _makespan(self, microbatches: int) -> float:
        """Seconds of the schedule with so many microbatches: that of `timeline`."""
        layout, blocking = self.layout, self.program.blocking_transfers
        within, between = (self.transfer, 0.0) if blocking else (0.0, self.transfer)
        durations = np.empty((2, layout.pipeline, layout.chunks))
        for rank, chunk in np.ndindex(layout.pipeline, layout.chunks):
            durations[:, rank, chunk] = self.chunk_seconds(rank, chunk)
        shape = layout.pipeline, layout.chunks, microbatches
        return pipeline_makespan(layout.schedule, shape, durations + within, between)

    @functools.cached_property
    def busiest(self) -> tuple[float, float]:
        """Seconds per microbatch on the busiest stage: embedding, head and loss only; everything."""
        layout = self.layout
        layers = self.layers.total
        ends = max(
            0.0,  # a stage in the middle, if first and last have less work
            *(
                sum(self.chunk(rank, chunk).total for chunk in range(layout.chunks)) - layers
                for rank in {0, layout.pipeline - 1}
            ),
        )
        transfers = 2 * self.transfer if self.program.blocking_transfers else 0.0
        return ends, layers + ends + layout.chunks * (self.accumulation + transfers)

    def lower_bound(self) -> float:
        """Seconds that `step().seconds` is not below, without a simulation."""
        return self.pipeline_bound() + self.gradients() + self.optimizer()

    def pipeline_bound(self) -> float:
        """Seconds that `pipeline_seconds` is not below.

        A stage waits for the first microbatch to pass the stages before it, works, and these then end their backward
        passes of the last microbatch.
        """
        layout, before, bound = self.layout, 0.0, 0.0
        transfers = 2 * self.transfer
        inside = transfers if self.program.blocking_transfers else 0.0
        for rank in range(layout.pipeline):
            chunks = [sum(self.chunk_seconds(rank, chunk)) for chunk in range(layout.chunks)]
            bound = max(bound, before + self.microbatches * (sum(chunks) + layout.chunks * inside))
            before += chunks[0] + transfers
        return bound

    def gradients(self) -> float:
        """Exposed seconds of gradient reduction, of the tied embeddings' reduction, and of parameter all-gathers."""
        return sum(exchange.exposed for exchange in self.exchanges())

    def exchanges(self) -> list[Exchange]:
        """Communication among replicas, and between the stages that hold the embedding."""
        exchanges = self._sharded_exchanges() if self.layout.sharded_parameters else self._replica_exchanges()
        tied = self._tied()
        return [*exchanges, Exchange("tied embeddings", tied, 0.0, tied)] if tied else exchanges

    def _over_replicas(self, element: float) -> Iterator[tuple[float, Group]]:
        """Yield the bytes of the dense parameters and of the experts, with `element` bytes each, and their groups."""
        layout, cluster = self.layout, self.cluster
        experts = stage_expert_parameters(self.job, layout, self._largest_stage)
        yield (self._parameters - experts) * element, layout.data_group(cluster)
        if experts:
            yield experts * element, layout.expert_data_group(cluster)

    def _replica_exchanges(self) -> list[Exchange]:
        """`exchanges` of processes that hold all parameters: a reduction, and a gather for a sharded optimizer."""
        layout, cluster = self.layout, self.cluster
        if layout.replicas == 1:
            return []
        scattered = layout.distributed_optimizer and not self.program.whole_gradients
        exchange = cluster.reduce_scatter if scattered else cluster.all_reduce
        seconds = sum(exchange(*message) for message in self._over_replicas(self._reduced))
        hidden, exposed = self._overlapped(seconds) if layout.overlap_grad_reduce else (0.0, seconds)
        exchanges = [Exchange("gradient reduction", seconds, hidden, exposed)]
        if layout.distributed_optimizer:
            messages = self._over_replicas(cluster.device.element)
            seconds = sum(cluster.all_gather(*message) for message in messages)
            # Beside forward but for the first layer's parameters, and what the gather takes from the SMs.
            overlaps = layout.overlap_grad_reduce and self.program.parameter_overlap
            hidden = min(self.layers.forward.total, seconds) if overlaps else 0.0
            exchanges.append(
                Exchange(
                    "parameter gather",
                    seconds,
                    hidden,
                    seconds - (1 - self.cluster.efficiency.beside) * hidden,
                )
            )
        return exchanges

    def _sharded_exchanges(self) -> list[Exchange]:
        """`exchanges` of ranks that hold parts of the parameters.

        Each layer is gathered in forward and again in backward, and its gradients are reduced, for each microbatch,
        beside the computation of the layers before.
        """
        cluster, m, layers = self.cluster, self.microbatches, self.layers
        gather = sum(cluster.all_gather(*message) for message in self._over_replicas(cluster.device.element))
        reduce = sum(cluster.reduce_scatter(*message) for message in self._over_replicas(self._reduced))
        exchanges = []
        for kind, seconds, compute in (
            ("forward", gather, layers.forward.total),
            ("backward", gather + reduce, layers.backward.total),
        ):
            name = "parameter gather" if kind == "forward" else "parameter gather and gradient reduction"
            hidden = min(seconds, compute)
            exposed = seconds - (1 - self.cluster.efficiency.beside) * hidden
            exchanges.append(Exchange(name, m * seconds, m * hidden, m * exposed, kind))
        return exchanges

    def _tied(self) -> float:
        """Seconds of the reduction of the embedding table that the first and the last stage hold."""
        job, layout, cluster = self.job, self.layout, self.cluster
        copied = job.model.mtp_num_layers or not job.model.untie_embeddings_and_output_weights
        if layout.pipeline == 1 or not copied:
            return 0.0
        table = job.padded_vocab_size(layout.tensor) / layout.tensor * job.model.hidden_size
        ends = cluster.group(2, layout.processes - layout.processes // layout.pipeline)
        return cluster.all_reduce(self._reduced * table, ends)

    @property
    def _reduced(self) -> int:
        """Bytes of an element of a gradient on the links."""
        return self.program.reduced or self.program.gradient

    def _overlapped(self, reduce: float) -> tuple[float, float]:
        """Seconds of a reduction beside the last backward of each chunk, and those that it adds to the step.

        The embedding's gradient is complete only when backward ends. The rest is hidden on the links but not in memory
        bandwidth, which backward uses at the same time, nor on the SMs.
        """
        layout = self.layout
        last = end_parameters(self.job, layout.tensor, first=True, last=False) / self._parameters
        hidden = min(self.layers.backward.total, (1 - last) * reduce)
        halves = 1 if layout.distributed_optimizer else 2
        memory = halves * RING_ACCESSES * self._reduced * self._parameters / self._stream_bandwidth
        return hidden, reduce - hidden + (memory / reduce + self.cluster.efficiency.beside) * hidden

    def optimizer(self) -> float:
        """Seconds of the update of this replica's share of the parameters."""
        owned = owned_parameters(self.job, self.layout, self._largest_stage)
        element = self.cluster.device.element
        copied = 0 if element == 4 else element  # fp32 weights are their own master weights
        return owned * (OPTIMIZER_BYTES + copied) / self._stream_bandwidth

    def recompute(self) -> float:
        """Seconds of recomputation of a microbatch on the stage of `layers`."""
        stage = max(self.stages, key=lambda stage: self._layers(stage).total)
        dense, experts = (sum(numbers) for numbers in zip(*self.chunk_layers[stage], strict=True))
        seconds = dense * self.kernels.recomputed(self.kernels.layer.forward).total
        if experts:
            seconds += experts * self.kernels.recomputed(self.kernels.expert_layer.forward).total
            seconds += experts * self.job.model.moe_layer_recompute * self.kernels.routed.forward.total
        return seconds

    def step(self) -> Step:
        """Predict a step."""
        layout, m = self.layout, self.microbatches
        pipeline, (ends, busy) = self.pipeline_seconds(), self.busiest
        layers = (self.layers.forward + self.layers.backward) * m
        gradients, optimizer = self.gradients(), self.optimizer()
        return Step(
            seconds=pipeline + gradients + optimizer,
            matmul=layers.matmul,
            elementwise=layers.elementwise + self.accumulation * layout.chunks * m,
            tensor_parallel=layers.tensor_parallel,
            expert_parallel=layers.expert_parallel,
            context_parallel=layers.context_parallel,
            host=layers.host,
            recompute=self.recompute() * m,
            ends=ends * m,
            transfers=2 * layout.chunks * m * self.transfer if self.program.blocking_transfers else 0.0,
            bubble=pipeline - m * busy,
            gradients=gradients,
            optimizer=optimizer,
        )
