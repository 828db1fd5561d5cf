"""Memory of each pipeline stage of a layout, by formulas.

The optimizer is AdamW.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

from megatron.parallel.schedules import BackwardWeight
from megatron.planner.activations import (
    backward_of_a_layer,
    chunk_activations,
    dense_after_experts,
    experts_working,
    layer_activations,
    leaving_activations,
    loss_working,
    recomputed_experts,
    recomputed_together,
    ring_working,
    transfer_buffers,
    waiting_bytes,
)
from megatron.planner.cluster import Cluster
from megatron.planner.held import UNLIMITED, Held, Pass, counted_microbatches, most_held
from megatron.planner.host_copies import (
    USABLE_HOST,
    OffloadedActivations,
    moments_after_forward,
    offloaded_activations,
    piece_bytes,
    returning,
)
from megatron.planner.layout import Job, Layout
from megatron.planner.parameters import (
    owned_parameters,
    stage_parameters,
)
from megatron.planner.programs import Program
from megatron.planner.split_passes import ChunkMemory, peak
from megatron.planner.units import UnitMemory, sharded_units

# Share of a device's memory, and at most so many bytes, for the driver, NCCL's buffers and fragmentation. NVIDIA's runs
# of Llama 3.1 405B on GB200 and of Llama 3 70B on GB300 use about 96% of the memory by these formulas.
RESERVED_SHARE, MAX_RESERVED = 0.08, 8e9
ADAM_MOMENTS = 8  # bytes per parameter: two means in fp32
BACKUP = 16  # and of post-validation's copy: those means, the weight and its gradient


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one process by purpose; `activations` at their peak.

    Attributes:
        backup: copies of what an update changes, for post-validation.
        host: bytes in host memory, which `total` excludes.
    """

    weights: float
    gradients: float
    master: float
    moments: float
    activations: float
    backup: float = 0.0
    host: float = 0.0

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.master + self.moments + self.activations + self.backup


def max_in_flight(layout: Layout, microbatches: int, stage: int) -> int:
    """Peak number of forward passes of chunks that await their backward pass on a stage (2104.04473 section 2.2)."""
    after = layout.pipeline - stage - 1
    warmup = after if layout.chunks == 1 else 2 * after + (layout.chunks - 1) * layout.pipeline
    return min(microbatches * layout.chunks, warmup + 1)


def kept_activations(
    job: Job, layout: Layout, element: int, stage: int, program: Program
) -> tuple[float, float, float]:
    """Bytes that a stage keeps of its microbatches, and how many it holds of the first and of the last chunk."""
    chunks = range(layout.chunks)
    of_chunk = [chunk_activations(job, layout, element, stage, chunk, program) for chunk in chunks]
    waiting = [
        waiting_bytes(job, layout, element, stage, chunk) if layout.splits_backward else 0.0
        for chunk in chunks
    ]
    kept, first, last = most_kept(job, layout, stage, of_chunk, waiting)
    # With 1F1B and interleaving the layers of multi-token prediction have one microbatch in flight.
    mtp = job.model.mtp_num_layers if layout.schedule_name in ("1f1b", "interleaved") else 0
    if stage == layout.last_stage and mtp:
        experts = job.model.all_expert_layers[-1]
        layer = layer_activations(
            job, layout, element, program, recompute=layout.recompute, has_experts=experts
        )
        in_flight = max_in_flight(layout, layout.microbatches(job), stage)
        kept -= mtp * (in_flight / layout.chunks - 1) * layer
    return kept, first, last


def most_kept(
    job: Job, layout: Layout, stage: int, of_chunk: list[float], waiting: list[float]
) -> tuple[float, float, float]:
    """The most bytes that a stage keeps at once, and how many microbatches it then holds of the first and last chunk.

    The interleaved schedule has many passes; its numbers follow from a formula, as those of 1F1B do.

    Args:
        of_chunk, waiting: bytes of each chunk of a microbatch from forward to backward, and from there to its weight
            gradients.
    """
    m = layout.microbatches(job)
    if layout.schedule_name in ("1f1b", "interleaved"):
        in_flight = max_in_flight(layout, m, stage)
        first = layout.pipeline if layout.chunks == 1 else 2 * layout.pipeline - 1
        return in_flight * sum(of_chunk) / layout.chunks, min(m, first), 1
    if layout.schedule_name in UNLIMITED:
        return m * sum(of_chunk), m, m
    of_kind = [*of_chunk, *waiting]

    def kept_at(moment: Sequence[int]) -> float:
        return sum(number * bytes_ for number, bytes_ in zip(moment, of_kind, strict=True))

    # With the microbatch of the pass that runs.
    chunks = layout.chunks
    moments = []
    for (kind, chunk), held in split_moments(job, layout, stage):
        own = chunk + (chunks if kind is BackwardWeight else 0)
        moments.append([number + (i == own) for i, number in enumerate(held)])
    most = max(moments, key=kept_at)
    return kept_at(most), most[0], most[chunks - 1]


def split_moments(job: Job, layout: Layout, stage: int) -> tuple[tuple[Pass, Held], ...]:
    """The most that a stage holds in a pass, with a schedule that splits backward passes."""
    m = counted_microbatches(layout.schedule_name, layout.pipeline, layout.microbatches(job))
    return most_held(layout.schedule(job), layout.pipeline, layout.chunks, m, stage)


def stage_memory(job: Job, layout: Layout, cluster: Cluster, stage: int, program: Program) -> Memory:
    """Memory of each process of a stage at the peak of a step."""
    element = cluster.device.element
    of_stage = job, layout, element, stage, program
    offloaded, working = _offloaded(*of_stage), _layer_working(*of_stage)
    if layout.splits_backward:
        first_group, largest_group, _ = recomputed_together(job, layout, stage)
        working += _recomputed_layers(*of_stage, max(first_group, largest_group))
        activations = split_activations(*of_stage, working)
    else:
        activations = _whole_activations(*of_stage, working, offloaded)
    state = stage_state(*of_stage)
    held = offloaded.host if offloaded else 0.0
    return dataclasses.replace(state, activations=activations, host=state.host + held)


def _offloaded(
    job: Job, layout: Layout, element: int, stage: int, program: Program
) -> OffloadedActivations | None:
    """The most that the layers of a stage keep with offload; None if nothing leaves."""
    of_chunks = [(job, layout, element, stage, chunk, program) for chunk in range(layout.chunks)]
    leaving = [leaving_activations(*of_chunk) for of_chunk in of_chunks]
    if not any(leaving):
        return None
    stay = [chunk_activations(*of_chunk) for of_chunk in of_chunks]
    return offloaded_activations(job, layout, stage, stay, leaving)


def _layer_working(job: Job, layout: Layout, element: int, stage: int, program: Program) -> float:
    """Bytes that a layer needs beside what layers keep. Gradients within it are known of this program only."""
    has_experts = any(experts for _, experts in layout.layers(job)[stage])
    if not program.chunked_logits:
        return recomputed_experts(job, layout, element, program) if has_experts else 0.0
    backward = backward_of_a_layer(job, layout, element)
    if not has_experts:
        return max(backward, ring_working(job, layout, element, program))
    layer = layer_activations(job, layout, element, program, recompute=layout.recompute)
    freed = dense_after_experts(job, layout, stage) * layer
    return max(experts_working(job, layout, element, program) - freed, backward if freed else 0.0)


def _recomputed_layers(
    job: Job, layout: Layout, element: int, stage: int, program: Program, number: int
) -> float:
    """Bytes of layers that are recomputed at a time, of which the first one's input is kept."""
    if layout.recompute != "full":
        return 0.0
    of_layer = functools.partial(layer_activations, job, layout, element, program)
    layers = layout.layers(job)[stage]
    experts = sum(experts for _, experts in layers)
    routed = math.ceil(number * experts / max(1, sum(map(sum, layers))))
    whole = routed * of_layer(recompute="none", has_experts=True) if routed else 0.0
    return whole + (number - routed) * of_layer(recompute="none") - of_layer(recompute="full")


def _whole_activations(
    job: Job,
    layout: Layout,
    element: int,
    stage: int,
    program: Program,
    working: float,
    offloaded: OffloadedActivations | None,
) -> float:
    """The most bytes of a stage's activations with a schedule whose backward passes are whole.

    Args:
        working: bytes that a layer needs beside what layers keep.
    """
    of_stage = job, layout, element, stage, program
    kept, first, last = kept_activations(*of_stage)
    if offloaded is not None:
        kept, working = offloaded.forward, working + offloaded.backward - offloaded.forward
    residual, hidden = job.residual_element(element), _hidden(job, layout)
    mtp = job.model.mtp_num_layers * hidden * (residual + 5 * element)
    # The final norm's input, and its output or, after the loss, the output's gradient.
    of_norm = hidden * (residual + element)
    if program.chunked_logits:
        kept += transfer_buffers(job, layout, element)
    if stage == 0 and job.model.hidden_dropout:  # the embeddings' dropout masks (2205.05198 section 4.3)
        kept += first * hidden
    units = sharded_units(job, layout, stage, element, program, recomputed_together(job, layout, stage)[:2])
    working = _most_working(*of_stage, working, units, mtp)
    if stage != layout.last_stage:
        return kept + working
    # Backward of the layers does not need the norm's of its microbatch; the loss comes before it.
    in_loss = loss_working(job, layout, element, program) + units.loss
    working = max(working, of_norm + in_loss, of_norm + units.after_loss)
    # Multi-token prediction: the embedding, both norms' outputs joined, the final norm's input and output, and the
    # gradient of that output.
    return kept + of_norm * (last - 1) + mtp + working


def _most_working(
    job: Job,
    layout: Layout,
    element: int,
    stage: int,
    program: Program,
    working: float,
    units: UnitMemory,
    mtp: float,
) -> float:
    """The most bytes that layers need beside what they keep, in forward, and in backward of each group of them.

    Args:
        working: bytes that a single layer needs.
        mtp: bytes of multi-token prediction, with whose layers backward begins.
    """
    of_stage = job, layout, element, stage, program
    layers = layout.layers(job)[stage]
    has_experts = any(experts for _, experts in layers)
    layer = layer_activations(
        job, layout, element, program, recompute=layout.recompute, has_experts=has_experts
    )
    microbatch = sum(
        chunk_activations(job, layout, element, stage, chunk, program) for chunk in range(layout.chunks)
    )
    first_group, largest_group, later = recomputed_together(job, layout, stage)
    # Freed when backward comes to a larger group.
    freed = later * layer + mtp * (stage == layout.last_stage and largest_group > 1)
    return max(
        working + _recomputed_layers(*of_stage, first_group) + units.first_backward,
        working + _recomputed_layers(*of_stage, largest_group) + units.backward - freed,
        units.forward - microbatch,
        units.end_of_forward,
    )


def _hidden(job: Job, layout: Layout) -> float:
    """Elements of the residual stream of a microbatch on a rank."""
    return layout.tokens(job) * job.model.hidden_size / (layout.tensor if layout.sequence_parallel else 1)


def split_activations(
    job: Job, layout: Layout, element: int, stage: int, program: Program, working: float
) -> float:
    """The most bytes of a stage's activations with a schedule that splits backward passes.

    Args:
        working: bytes that backward of a layer needs beside what layers keep.
    """
    model, residual = job.model, job.residual_element(element)
    tokens, hidden = layout.tokens(job), _hidden(job, layout)
    memory = []
    for chunk, layers in enumerate(layout.layers(job)[stage]):
        kept = chunk_activations(job, layout, element, stage, chunk, program)
        waiting = waiting_bytes(job, layout, element, stage, chunk)
        of_layer = layer_activations(
            job, layout, element, program, recompute=layout.recompute, has_experts=layers[1] > 0
        )
        # The sum of a layer's residual stream and its last product.
        forward = 2 * residual * hidden
        if layout.recompute == "full":  # of the layer that runs; after it only the sum is left
            ffn = tokens * model.ffn_hidden_size / layout.tensor
            forward += element * ffn * (4 if model.gated else 2)
        if layout.is_first(stage, chunk) and model.hidden_dropout:
            kept += hidden
        leaving = leaving_activations(job, layout, element, stage, chunk, program)
        back = returning(job, layout, stage, chunk, leaving)
        forward += back.at_end
        if layout.is_last(stage, chunk):
            kept += (residual + element) * hidden
            forward = max(forward, loss_working(job, layout, element, program))
        layer = (of_layer, waiting / max(1, sum(layers)))
        memory.append(
            ChunkMemory.make(
                kept=kept, waiting=waiting, layer=layer, working=working, forward=forward, back=back
            )
        )
    moments = (
        moments_after_forward(job, layout, stage)
        if layout.offload_layers != 0
        else ((pass_, None, held) for pass_, held in split_moments(job, layout, stage))
    )
    activations = transfer_buffers(job, layout, element) + peak(moments, memory)
    if stage == layout.last_stage:
        activations += model.mtp_num_layers * hidden * (residual + 5 * element)
    return activations


def state_bytes(element: int) -> int:
    """Bytes of a parameter's optimizer state: its moments, and its master weight unless the weight is in fp32."""
    return ADAM_MOMENTS + (0 if element == 4 else 4)


def stage_state(job: Job, layout: Layout, element: int, stage: int, program: Program) -> Memory:
    """Memory of each process of a stage without activations."""
    owned = owned_parameters(job, layout, stage)
    weights = gradients = stage_parameters(job, layout, stage)
    if layout.sharded_gradients or layout.sharded_parameters:
        gradients = owned
    if layout.sharded_parameters:
        weights = 0.0 if program.fp32_shards and element < 4 else owned
    moments, host = ADAM_MOMENTS * owned, 0.0
    master = state_bytes(element) * owned - moments
    if layout.offload_optimizer:
        host = master + moments
        master, moments = 0.0, piece_bytes(job, layout, stage, host)
    return Memory(
        weights=element * weights,
        gradients=program.gradient * gradients,
        master=master,
        moments=moments,
        activations=0.0,
        backup=BACKUP * owned if layout.post_validation else 0.0,
        host=host,
    )


def max_memory(job: Job, layout: Layout, cluster: Cluster, program: Program) -> Memory:
    """Memory of the stage that needs most: the first holds the most activations per layer, the last the logits.

    Host memory is that of the stage that needs most of it.
    """
    stages = [stage_memory(job, layout, cluster, stage, program) for stage in layout.distinct_stages(job)]
    largest = max(stages, key=lambda memory: memory.total)
    return dataclasses.replace(largest, host=max(memory.host for memory in stages))


def usable_memory(cluster: Cluster) -> float:
    """Bytes of a device's memory that a model can use."""
    return cluster.device.memory - min(RESERVED_SHARE * cluster.device.memory, MAX_RESERVED)


def fits(memory: Memory, cluster: Cluster) -> bool:
    """Return True if it fits the usable memory of a device, and that of its share of the host."""
    host = cluster.host.memory
    return memory.total <= usable_memory(cluster) and (host is None or memory.host <= USABLE_HOST * host)
