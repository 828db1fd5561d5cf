"""Time of a step: the schedule's action lists run with a clock, then gradient reduction and the optimizer."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from megatron.parallel.schedules import Backward, BackwardInput, Compute, Forward, Timeline, simulate
from megatron.planner.activations import leaving_activations
from megatron.planner.cluster import Cluster
from megatron.planner.costs import ForwardBackward
from megatron.planner.exchanges import Exchange, Replicas
from megatron.planner.kernels import Kernels
from megatron.planner.layout import Job, Layout
from megatron.planner.memory import BACKUP, state_bytes
from megatron.planner.parameters import (
    largest_stage,
    owned_parameters,
    stage_expert_parameters,
    stage_parameters,
)
from megatron.planner.pipeline_clock import KINDS, Earlier, passes_before_validation, pipeline_ends
from megatron.planner.programs import Program

# Bytes per parameter that an optimizer step reads and writes in fp32: the gradient twice (its norm comes first), and
# master weight and two moments, each read and written.
OPTIMIZER_BYTES = 4 * (2 + 2 * 3)
# Groups of microbatches (one per stage) after which every further group takes the same time, by schedule, and for
# those that are not named.
WARMUP_GROUPS, MORE_GROUPS = {"1f1b": 2, "interleaved": 2}, 5
# Forward passes of all stages.
MAX_WHOLE = 2048
# Steps after the first until the time of a step repeats that is validated in the next.
VALIDATED_STEPS = 4


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
        host_copies: waiting for copies of activations to host memory and back.
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
    host_copies: float


class Simulator:
    """Durations of a job's computations in a layout, and of a step."""

    def __init__(
        self, job: Job, layout: Layout, cluster: Cluster, program: Program, kernels: Kernels | None = None
    ) -> None:
        self.job, self.layout, self.cluster, self.program = job, layout, cluster, program
        self.kernels = kernels or Kernels(job, layout, cluster, program)
        self.microbatches = layout.microbatches(job)
        self.stages, self.chunk_layers = layout.distinct_stages(job), layout.layers(job)
        # A microbatch's gradients of a chunk are read, and the accumulated gradients read and written. In fp32 the
        # products add to the accumulated gradients, which costs only one more read. Grouped products of experts do not;
        # their constant, fitted with the same formula, includes the addition.
        element = cluster.device.element
        moved = element + 2 * program.gradient if element < 4 else program.gradient
        size = self._parameters / layout.chunks * moved
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
        return largest_stage(self.job, self.layout)

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
        (dense, experts), layout = self.chunk_layers[rank][chunk], self.layout
        first, last = layout.is_first(rank, chunk), layout.is_last(rank, chunk)
        return self.kernels.chunk(dense, experts, first=first, last=last)

    @functools.cached_property
    def layers(self) -> ForwardBackward:
        """Layers of all chunks of the stage whose layers take the longest, on one microbatch."""
        return max((self._layers(stage) for stage in self.stages), key=lambda layers: layers.total)

    def _layers(self, stage: int) -> ForwardBackward:
        dense, experts = (sum(numbers) for numbers in zip(*self.chunk_layers[stage], strict=True))
        return self.kernels.chunk(dense, experts, first=False, last=False)

    def chunk_seconds_with_exchanges(self, rank: int, chunk: int) -> tuple[float, float, float]:
        """`chunk_seconds_alone`, with what passes wait for exchanges among replicas."""
        forward, backward, weights = self.chunk_seconds_alone(rank, chunk)
        return forward + self.beside["forward"], backward + self.beside["backward"], weights

    def chunk_seconds_alone(self, rank: int, chunk: int) -> tuple[float, float, float]:
        """Seconds of `chunk` forward and backward, and those of backward for weight gradients.

        Backward accumulates gradients.
        """
        (dense, experts), layout = self.chunk_layers[rank][chunk], self.layout
        first, last = layout.is_first(rank, chunk), layout.is_last(rank, chunk)
        forward, backward, weights = self.kernels.chunk_seconds(dense, experts, first=first, last=last)
        forward += self.copy_wait(Forward, rank, chunk)
        backward += self.copy_wait(Backward, rank, chunk)
        return forward, backward + self.accumulation, weights + self.accumulation * self._split_share

    def copy_wait(self, kind: type[Compute], rank: int, chunk: int) -> float:
        """Seconds that a pass of a chunk waits for copies of activations beside its layers."""
        if self.layout.offload_layers == 0:
            return 0.0
        of_chunk = (self.job, self.layout, self.cluster.device.element, rank, chunk, self.program)
        copy = leaving_activations(*of_chunk) / self.cluster.host.copy
        dense, experts = self.chunk_layers[rank][chunk]
        forward, backward, weights = self.kernels.chunk_seconds(dense, experts, first=False, last=False)
        beside = {Forward: forward, Backward: backward, BackwardInput: backward - weights}
        return max(0.0, copy - beside[kind])

    @functools.cached_property
    def stage_waits(self) -> float:
        """Seconds that the stage which waits longest waits for copies of a microbatch."""
        backward, chunks = (
            BackwardInput if self.layout.splits_backward else Backward,
            range(self.layout.chunks),
        )
        return max(
            sum(self.copy_wait(kind, rank, chunk) for kind in (Forward, backward) for chunk in chunks)
            for rank in self.stages
        )

    @functools.cached_property
    def _split_share(self) -> float:
        """Share of the gradients that wait in a split backward pass: all but those of grouped experts."""
        if not self.job.model.moe_grouped_gemm:
            return 1.0
        experts = stage_expert_parameters(self.job, self.layout, self._largest_stage)
        return 1 - experts / self._parameters

    def pass_seconds(self, rank: int, chunk: int) -> tuple[float, float, float, float]:
        """Seconds that each of `pipeline_clock.KINDS` keeps a stage busy."""
        transfer = self.transfer if self.program.blocking_transfers else 0.0
        forward, backward, weights = self.chunk_seconds_with_exchanges(rank, chunk)
        split = backward - weights
        if self.layout.splits_backward:
            split += self.copy_wait(BackwardInput, rank, chunk) - self.copy_wait(Backward, rank, chunk)
        return forward + transfer, backward + transfer, split + transfer, weights

    def duration(self, rank: int, action: Compute) -> float:
        """Seconds that a compute keeps a stage busy."""
        return self.pass_seconds(rank, action.chunk)[KINDS.index(type(action))]

    def timeline(self, microbatches: int) -> Timeline:
        """Start and end of each rank's computes, by the schedule's action lists."""
        layout = self.layout
        schedule = layout.schedule(self.job)(layout.pipeline, layout.chunks, microbatches)
        transfer = 0.0 if self.program.blocking_transfers else self.transfer
        return simulate(schedule, layout.pipeline, self.duration, transfer, layout.v_shaped)

    def pipeline_seconds(self) -> float:
        """Seconds from the first forward to the last backward.

        Of many microbatches only the first groups are simulated: after `WARMUP_GROUPS` each further one adds the same.
        The automatic schedule is simulated whole, and so is ZB-V up to `MAX_WHOLE` passes: its lists do not repeat.
        """
        m, stages, simulated = self.microbatches, self.layout.pipeline, self._simulated
        if stages == 1:
            return m * (self.busiest[1] + sum(self.beside.values()))
        if m == simulated:
            return self._makespan(m)
        longer, shorter = self._makespan(simulated), self._makespan(simulated - stages)
        # A slow stage may not yet hold up the others in the simulated groups, but it does in the end.
        return max(self.pipeline_bound(), longer + (m - simulated) / stages * (longer - shorter))

    @property
    def _simulated(self) -> int:
        """Number of microbatches that are simulated."""
        m, stages, name = self.microbatches, self.layout.pipeline, self.layout.schedule_name
        whole = name == "auto" or (name == "zb-v" and m * stages * self.layout.chunks <= MAX_WHOLE)
        return m if whole else min(m, (WARMUP_GROUPS.get(name, MORE_GROUPS) + 1) * stages + m % stages)

    def _makespan(self, microbatches: int) -> float:
        """Seconds of the schedule with so many microbatches: that of `timeline`."""
        return float(self._ends(microbatches).max())

    def _ends(self, microbatches: int, earlier: Earlier | None = None) -> np.ndarray:
        """Seconds at which the last pass of each stage ends."""
        layout = self.layout
        between = 0.0 if self.program.blocking_transfers else self.transfer
        durations = np.empty((len(KINDS), layout.pipeline, layout.chunks))
        for rank, chunk in np.ndindex(layout.pipeline, layout.chunks):
            durations[:, rank, chunk] = self.pass_seconds(rank, chunk)
        shape, schedule = (layout.pipeline, layout.chunks, microbatches), layout.schedule(self.job)
        return pipeline_ends(schedule, shape, durations, between, v_shaped=layout.v_shaped, earlier=earlier)

    @functools.cached_property
    def saved(self) -> float:
        """Seconds of a step that post-validation saves, if no gradient needs clipping.

        Steps are simulated one after the other until their times repeat: a stage ends its passes, updates, and begins
        the next step; before its first backward pass it waits for the norm of all stages' gradients.
        """
        layout, m = self.layout, self._simulated
        if not layout.post_validation:
            return 0.0
        shape = layout.pipeline, layout.chunks, m
        passes = np.array(passes_before_validation(layout.schedule(self.job), *shape, layout.v_shaped))
        reduced, update = self.end_of_step(), self.optimizer()
        ends, period = self._ends(m), 0.0
        alone = float(ends.max()) + reduced + update
        for _ in range(VALIDATED_STEPS):
            norm = float(ends.max()) + reduced
            ends = self._ends(m, Earlier(ends + reduced + update, passes, norm))
            period = float(ends.max()) + reduced - norm
        return alone - period

    @functools.cached_property
    def busiest(self) -> tuple[float, float]:
        """Seconds per microbatch on the busiest stage: embedding, head and loss only; everything."""
        layout = self.layout
        layers = self.layers.total
        ends = max(
            0.0,  # a stage in the middle, if first and last have less work
            *(
                sum(self.chunk(rank, chunk).total for chunk in range(layout.chunks)) - layers
                for rank in {0, layout.last_stage}
            ),
        )
        transfers = 2 * self.transfer if self.program.blocking_transfers else 0.0
        total = layers + ends + layout.chunks * (self.accumulation + transfers) + self.stage_waits
        return ends, total

    def lower_bound(self) -> float:
        """Seconds that `step().seconds` is not below, without a simulation."""
        return self.pipeline_bound() + self.end_of_step() + self.optimizer()

    def pipeline_bound(self, *, exchanges: bool = True) -> float:
        """Seconds that `pipeline_seconds` is not below, or would not be without what runs beside the passes.

        A stage waits for the first microbatch to pass the stages before it, works, and these then end their backward
        passes of the last microbatch. If backward passes are split, a stage may end with weight gradients, so that the
        others do not wait. With post-validation the first microbatches run beside the step before.
        """
        layout, before, bound = self.layout, 0.0, 0.0
        transfers = 2 * self.transfer
        inside = transfers if self.program.blocking_transfers else 0.0
        found: dict[tuple[object, ...], tuple[float, float]] = {}  # the stages in the middle are alike
        for rank in range(layout.pipeline):
            key = self.chunk_layers[rank], rank == 0, rank == layout.last_stage
            if key not in found:
                seconds = self.chunk_seconds_with_exchanges if exchanges else self.chunk_seconds_alone
                chunks = [seconds(rank, chunk) for chunk in range(layout.chunks)]
                work = self.microbatches * sum(forward + back + inside for forward, back, _ in chunks)
                forward, backward, _ = chunks[0]
                wait = forward + self.transfer if layout.splits_backward else forward + backward + transfers
                found[key] = work, wait
            work, wait = found[key]
            bound = max(bound, before + work)
            before += 0.0 if layout.post_validation else wait
        return bound

    def gradients(self) -> float:
        """Exposed seconds of gradient reduction, of the tied embeddings' reduction, and of parameter all-gathers."""
        return sum(exchange.exposed for exchange in self.exchanges())

    def end_of_step(self) -> float:
        """The part of `gradients` after the last pass; the other part is in the passes."""
        return sum(exchange.exposed for exchange in self.exchanges() if exchange.beside is None)

    def exchanges(self) -> list[Exchange]:
        """Communication among replicas, and between the stages that hold the embedding."""
        return self._exchanges

    @functools.cached_property
    def _exchanges(self) -> list[Exchange]:
        stage = self._largest_stage
        of_stage = (self.job, self.layout, self.cluster, self.program, stage, self.layers, self.microbatches)
        return Replicas(*of_stage).exchanges()

    @functools.cached_property
    def beside(self) -> dict[str, float]:
        """Exposed seconds of the exchanges beside each forward and backward pass of a chunk."""
        passes = self.microbatches * self.layout.chunks
        seconds = {"forward": 0.0, "backward": 0.0}
        for exchange in self.exchanges():
            if exchange.beside is not None:
                seconds[exchange.beside] += exchange.exposed / passes
        return seconds

    def optimizer(self) -> float:
        """Seconds of the update of this replica's share of the parameters.

        Offloaded state is copied to the device and back beside it. Post-validation first makes a copy.
        """
        owned = owned_parameters(self.job, self.layout, self._largest_stage)
        element = self.cluster.device.element
        copied = 0 if element == 4 else element  # fp32 weights are their own master weights
        if self.layout.post_validation:
            copied += 2 * BACKUP  # read and written
        seconds = owned * (OPTIMIZER_BYTES + copied) / self._stream_bandwidth
        if not self.layout.offload_optimizer:
            return seconds
        return max(seconds, state_bytes(element) * owned / self.cluster.host.exchange)

    def recompute(self) -> float:
        """Seconds of recomputation of a microbatch on the stage of `layers`."""
        stage = max(self.stages, key=lambda stage: self._layers(stage).total)
        dense, experts = (sum(numbers) for numbers in zip(*self.chunk_layers[stage], strict=True))
        seconds = dense * self.kernels.recomputed(self.kernels.layer.forward).total
        if experts:
            seconds += (
                experts * self.kernels.recomputed(self.kernels.expert_layer.forward, experts=True).total
            )
            seconds += experts * self.job.model.moe_layer_recompute * self.kernels.routed.forward.total
        return seconds

    def step(self) -> Step:
        """Predict a step."""
        layout, m = self.layout, self.microbatches
        pipeline, (ends, busy) = self.pipeline_seconds(), self.busiest
        end_of_step = self.end_of_step()
        layers = (self.layers.forward + self.layers.backward) * m
        gradients, optimizer = self.gradients(), self.optimizer()
        pipeline = max(self.pipeline_bound(), pipeline - self.saved) if self.saved else pipeline
        return Step(
            seconds=pipeline + end_of_step + optimizer,
            matmul=layers.matmul,
            elementwise=layers.elementwise + self.accumulation * layout.chunks * m,
            tensor_parallel=layers.tensor_parallel,
            expert_parallel=layers.expert_parallel,
            context_parallel=layers.context_parallel,
            host=layers.host,
            recompute=self.recompute() * m,
            ends=ends * m,
            transfers=2 * layout.chunks * m * self.transfer if self.program.blocking_transfers else 0.0,
            bubble=max(0.0, pipeline - m * busy - (gradients - end_of_step)),
            gradients=gradients,
            optimizer=optimizer,
            host_copies=m * self.stage_waits,
        )
