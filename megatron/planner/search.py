"""Search the layouts of a job on a cluster: those that fit, and the fastest of them."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from megatron.errors import InputError
from megatron.model.flops import layer_flops, vocabulary_flops
from megatron.planner.cluster import Cluster
from megatron.planner.kernels import Kernels
from megatron.planner.layout import Job, Layout
from megatron.planner.memory import USABLE_MEMORY, Memory, fits
from megatron.planner.our_program import memory_of, our_program, simulator_of
from megatron.planner.parameters import stage_parameters
from megatron.planner.programs import OURS
from megatron.planner.simulate import Simulator, Step

# Larger numbers of chunks per stage, and other microbatch sizes, gain nothing.
MAX_CHUNKS, MICRO_BATCH_SIZES = 8, (1, 2, 4, 8, 16, 32)
# Stages up to which V-shaped schedules, and stages of equal work, are tried; forward passes of the schedule auto.
MAX_V_STAGES, MAX_EQUAL_STAGES, MAX_AUTO_PASSES = 16, 32, 1024
# Experts are shared by more ranks only within a node.
EXPERT_TENSOR_SIZES = (1, 2, 4, 8)
# Longer parts of a sequence need no division: context parallelism is for long sequences.
MIN_CONTEXT_TOKENS = 2048
# For the smallest cluster: more replicas save hardly any memory, unless they shard the parameters.
MAX_REPLICAS, MAX_SHARDS = 16, 1024


@dataclasses.dataclass(frozen=True)
class Plan:
    """A layout that fits, with its predicted step and the memory of the process that needs most."""

    layout: Layout
    step: Step
    memory: Memory


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """The best plans, the fastest first.

    Attributes:
        layouts: number of layouts that divide job and cluster.
        timed: number of those simulated. The others are slower than the plans, by a lower bound of their time.
        too_large: number of those found not to fit.
    """

    plans: list[Plan]
    layouts: int
    timed: int
    too_large: int


def make_plan(job: Job, layout: Layout, cluster: Cluster) -> Plan:
    """Predict one layout."""
    step = simulator_of(job, layout, cluster).step()
    return Plan(layout, step, memory_of(job, layout, cluster))


def tensor_sizes(job: Job, cluster: Cluster) -> list[int]:
    """Tensor-parallel sizes that divide model and cluster, up to two nodes or an NVLink domain.

    A size beyond one node is included to show its cost: the links between nodes are too slow for communication in every
    layer (2104.04473 section 5.4.1).
    """
    sizes = range(1, min(cluster.nvlink_domain or 2 * cluster.per_node, cluster.devices) + 1)
    return [t for t in sizes if cluster.devices % t == 0 and can_tensor_parallel(job, t)]


def can_tensor_parallel(job: Job, tensor: int) -> bool:
    """Return True if so many ranks can share every layer."""
    model, shared = job.model, job.model.moe_shared_expert_intermediate_size or 0
    routes = model.num_experts is None or job.seq_length % tensor == 0
    return model.can_split(tensor) and shared % tensor == 0 and routes


def expert_sizes(job: Job, ranks: int) -> list[tuple[int, int]]:
    """Expert-parallel and expert-tensor-parallel sizes that divide the experts and the `ranks` of a stage."""
    model = job.model
    if model.num_experts is None or model.moe_ffn_hidden_size is None:
        return [(1, 1)]
    sizes = [e for e in range(1, model.num_experts + 1) if model.num_experts % e == 0]
    parts = [t for t in EXPERT_TENSOR_SIZES if model.moe_ffn_hidden_size % t == 0]
    return [(e, t) for e in sizes for t in parts if ranks % (e * t) == 0]


def divides_experts(layout: Layout, job: Job) -> bool:
    """Return True if the ranks of a stage can divide its experts so."""
    sizes = expert_sizes(job, layout.replicas * layout.tensor)
    return (layout.expert, layout.expert_tensor) in sizes


def pipeline_sizes(job: Job) -> list[int]:
    """Numbers of stages that leave every stage a layer."""
    return [p for p in range(1, job.model.num_layers + 1) if Layout(pipeline=p).splits_layers(job)]


def can_sequence_parallel(job: Job, layout: Layout) -> bool:
    """Return True if sequence parallelism is possible over the tensor-parallel ranks of a layout."""
    chunks = 2 * layout.context if layout.context > 1 else 1  # of a sequence
    return layout.tensor > 1 and job.seq_length % (layout.tensor * chunks) == 0


def can_shard_parameters(job: Job, layout: Layout) -> bool:
    """Return True if replicas may shard gradients and parameters: without experts, which are divided.

    Schedules that split backward passes compute a layer's gradients in several passes.
    """
    return job.model.num_experts is None and not layout.splits_backward


def context_sizes(job: Job, ranks: int) -> list[int]:
    """Context-parallel sizes that divide `ranks` and leave each rank a long part of the sequence."""
    sizes, c = [1], 2
    while job.seq_length >= c * MIN_CONTEXT_TOKENS and ranks % c == 0 and job.seq_length % (2 * c) == 0:
        sizes.append(c)
        c *= 2
    return sizes


def shapes(job: Job, cluster: Cluster) -> Iterator[Layout]:
    """Yield the axis sizes, chunks and microbatch sizes that divide job and cluster."""
    for t, p in itertools.product(tensor_sizes(job, cluster), pipeline_sizes(job)):
        ranks, rest = divmod(cluster.devices, t * p)
        if rest:
            continue
        for context, b in itertools.product(context_sizes(job, ranks), MICRO_BATCH_SIZES):
            data = ranks // context
            # Half the context-parallel ranks with half the microbatch have as many tokens and communicate less.
            if job.global_batch_size % (data * b) or (context > 1 and b > 1):
                continue
            axes = Layout(
                tensor=t,
                context=context,
                pipeline=p,
                data=data,
                micro_batch_size=b,
                overlap_grad_reduce=data * context > 1,
            )
            # Ranks share experts as they share the other layers, or not at all.
            experts = [(e, parts) for e, parts in expert_sizes(job, ranks * t) if parts in (1, t)]
            for v, (expert, parts) in itertools.product(chunk_numbers(job, axes), experts):
                yield dataclasses.replace(axes, chunks=v, expert=expert, expert_tensor=parts)


def chunk_numbers(job: Job, layout: Layout) -> list[int]:
    """Numbers of chunks per stage that the layers and microbatches of a layout allow."""
    numbers = range(1, MAX_CHUNKS + 1) if layout.pipeline > 1 else (1,)
    return [v for v in numbers if schedules(job, dataclasses.replace(layout, chunks=v))]


def schedules(job: Job, shape: Layout) -> list[str | None]:
    """Names of the schedules that a shape allows; None for 1F1B or the interleaved one.

    V-shaped ones are left out on many stages, where their lists take seconds to make. GPipe and breadth-first are never
    faster than 1F1B and the interleaved schedule; auto is tried for the plans found.
    """
    p, m = shape.pipeline, shape.microbatches(job)
    if p == 1:
        return [None]
    names: list[str | None] = []
    if shape.splits_layers(job) and (shape.chunks == 1 or m % p == 0):
        names.append(None)
    if shape.chunks == 1:
        return names + ["zb-h1", "zb-h2"] * len(names)
    if shape.chunks == 2 and p <= MAX_V_STAGES and job.model.num_layers % (2 * p) == 0:
        names += ["zb-v", "v-half", "v-min", *["dualpipe-v"] * (m >= 2 * p)]
    return names


def gains_by_division(job: Job, shape: Layout) -> bool:
    """Return True if stages of equal work may be faster: if the layers do not divide, or the output layer is large."""
    model, p = job.model, shape.pipeline
    if shape.chunks > 1 or not 1 < p <= MAX_EQUAL_STAGES:
        return False
    head = vocabulary_flops(model, job.padded_vocab_size(shape.tensor), job.seq_length)
    layer = layer_flops(model, job.seq_length, has_experts=model.num_experts is not None)
    return model.num_layers % p > 0 or model.mtp_num_layers > 0 or head > layer / 2


def shardings(job: Job, shape: Layout, cluster: Cluster) -> list[dict[str, Any]]:
    """Fields of the ways to shard over the replicas: each less memory, and more communication, than the one before.

    Parameters are also sharded within an NVLink domain only (hybrid sharding).
    """
    if shape.replicas == 1:
        return [{}]
    optimizer = {"distributed_optimizer": True}
    found: list[dict[str, Any]] = [{}, optimizer]
    if can_shard_parameters(job, shape):
        found.append(optimizer | {"sharded_gradients": True})
        within = shape.data_group(cluster).per_domain
        if 1 < within < shape.replicas and shape.replicas % within == 0:
            instances = shape.replicas // within
            found.append(optimizer | {"sharded_parameters": True, "instances": instances})
        found.append(optimizer | {"sharded_parameters": True})
    return found


def variants(shape: Layout, job: Job, cluster: Cluster) -> Iterator[Layout]:
    """Yield a shape with each schedule, with and without stages of equal work and each way to save memory.

    Selective recomputation is left out: fused attention has no scores for it to save.
    """
    parallel = (False, True) if can_sequence_parallel(job, shape) else (False,)
    divisions = (False, True) if gains_by_division(job, shape) else (False,)
    for name, balanced in itertools.product(schedules(job, shape), divisions):
        scheduled = dataclasses.replace(shape, pipeline_schedule=name, balanced=balanced)
        if scheduled.splits_backward:  # weight gradients are complete only at the end of a step
            scheduled = dataclasses.replace(scheduled, overlap_grad_reduce=False)
        ways = shardings(job, scheduled, cluster)
        for recompute, sequence_parallel, sharded in itertools.product(("none", "full"), parallel, ways):
            yield dataclasses.replace(
                scheduled, recompute=recompute, sequence_parallel=sequence_parallel, **sharded
            )


def search(
    job: Job,
    cluster: Cluster,
    *,
    num_plans: int,
    progress: Callable[[int], object],
    among: Iterable[Layout] | None = None,
) -> SearchResult:
    """Find the fastest layouts that fit; each shape counts with its fastest variant.

    Layouts are simulated in the order of a lower bound of their time, until that of the next exceeds the time of the
    plans found: the result is that of simulating all.

    Args:
        progress: called with the number of layouts examined so far.
        among: shapes to choose from; None for all `shapes`.

    Raises:
        InputError: no layout divides the job, or none fits; the message names the smallest sufficient cluster.
    """
    found: dict[tuple[object, ...], tuple[Kernels, float]] = {}
    experts = sum(job.model.all_expert_layers)
    dense = len(job.model.all_expert_layers) - experts

    def kernels_of(layout: Layout) -> tuple[Kernels, float]:
        """The times of a layout's operations, and of a microbatch in the whole model."""
        key = kernels_key(layout)
        if key not in found:
            kernels = Kernels(job, layout, cluster, our_program(job, layout, cluster))
            forward, backward, _ = kernels.chunk_seconds(dense, experts, first=True, last=True)
            found[key] = kernels, forward + backward
        return found[key]

    def simulate(layout: Layout) -> Simulator:
        kernels, _ = kernels_of(layout)
        return Simulator(job, layout, cluster, kernels.program, kernels)

    def mean_bound(layout: Layout) -> float:
        return layout.microbatches(job) * kernels_of(layout)[1] / layout.pipeline

    # Bounds of layouts without recomputation: with it they are slower, so only those that do not fit get it. A bound is
    # at first that of the stages' mean work, and made close only for layouts that may be among the fastest.
    bounds: list[tuple[float, int, bool, Layout, Layout]] = []
    considered = too_large = timed = 0
    for shape in shapes(job, cluster) if among is None else among:
        for layout in variants(shape, job, cluster):
            considered += 1
            if layout.recompute == "none":
                bounds.append((mean_bound(layout), len(bounds), False, layout, shape))
        progress(considered)
    heapq.heapify(bounds)
    best: dict[Layout, Plan] = {}
    limit = math.inf
    while bounds and bounds[0][0] < limit:
        _, number, is_close, layout, shape = heapq.heappop(bounds)
        if not is_close:
            if weights_fit(job, layout, cluster):
                heapq.heappush(bounds, (simulate(layout).lower_bound(), number, True, layout, shape))
            else:
                too_large += 2
            continue
        memory = memory_of(job, layout, cluster)
        if not fits(memory, cluster):
            too_large += 1
            if layout.recompute == "none":
                again = dataclasses.replace(layout, recompute="full")
                heapq.heappush(bounds, (simulate(again).lower_bound(), number, True, again, shape))
            continue
        timed += 1
        plan = Plan(layout, simulate(layout).step(), memory)
        if shape not in best or plan.step.seconds < best[shape].step.seconds:
            best[shape] = plan
            times = sorted(plan.step.seconds for plan in best.values())
            limit = times[num_plans - 1] if len(times) >= num_plans else math.inf
    if not best:
        raise InputError(_nothing_fits(job, cluster, too_large))
    plans = sorted(best.values(), key=lambda plan: plan.step.seconds)
    return SearchResult(plans[:num_plans], considered, timed, too_large)


def with_automatic_schedules(result: SearchResult, job: Job, cluster: Cluster) -> SearchResult:
    """Give each plan the schedule auto where it is faster and fits.

    Its search for a list takes long, so it is left out where its lower bound exceeds the plan's time, and in steps of
    many passes.
    """

    def faster(plan: Plan) -> Plan:
        layout = plan.layout
        kinds = layout.chunks == 1 or (layout.chunks == 2 and layout.v_shaped)
        passes = layout.pipeline * layout.chunks * layout.microbatches(job)
        sharded = layout.sharded_gradients or layout.sharded_parameters
        if layout.pipeline == 1 or not kinds or sharded or passes > MAX_AUTO_PASSES:
            return plan
        other = dataclasses.replace(layout, pipeline_schedule="auto", overlap_grad_reduce=False)
        if simulator_of(job, other, cluster).lower_bound() >= plan.step.seconds:
            return plan
        found = make_plan(job, other, cluster)
        return found if found.step.seconds < plan.step.seconds and fits(found.memory, cluster) else plan

    plans = sorted(map(faster, result.plans), key=lambda plan: plan.step.seconds)
    return dataclasses.replace(result, plans=plans)


def weights_fit(job: Job, layout: Layout, cluster: Cluster) -> bool:
    """Return False if the weights and gradients of a process alone exceed its memory."""
    if layout.sharded_parameters:
        return True
    parameters = max(stage_parameters(job, layout, stage) for stage in layout.distinct_stages(job))
    gradient = 0 if layout.sharded_gradients else OURS.gradient
    return parameters * (cluster.device.element + gradient) <= USABLE_MEMORY * cluster.device.memory


def kernels_key(layout: Layout) -> tuple[object, ...]:
    """The fields of a layout on which `Kernels` depends."""
    return (
        layout.tensor,
        layout.context,
        layout.expert,
        layout.expert_tensor,
        layout.micro_batch_size,
        layout.sequence_parallel,
        layout.recompute,
        layout.splits_backward,
    )


def _nothing_fits(job: Job, cluster: Cluster, too_large: int) -> str:
    """Say why there is no layout, and what to change."""
    smallest, devices = smallest_layout(job, cluster), cluster.devices
    if not too_large and smallest is not None and smallest.processes <= devices:
        # Every replica needs the same number of samples.
        sizes = itertools.product(tensor_sizes(job, cluster), pipeline_sizes(job))
        replicas = min(devices // (t * p) for t, p in sizes if devices % (t * p) == 0)
        below = job.global_batch_size // replicas * replicas
        nearest = f"{below} or {below + replicas}" if below else f"{replicas}"
        return (
            f"--global-batch-size: no layout divides {job.global_batch_size} samples, --num-layers "
            f"{job.model.num_layers} and --num-attention-heads {job.model.num_attention_heads} over {devices} devices; "
            f"choose {nearest} samples, or another number of devices"
        )
    usable = USABLE_MEMORY * cluster.device.memory / 1e9
    reason = f"no layout fits this model on {devices} {cluster.device.name} with {usable:.3g} GB each"
    if smallest is None:
        return f"{reason}, nor on more of them: a single layer is too large; choose devices with more memory"
    if smallest.processes <= devices:
        model_parallel = smallest.tensor * smallest.pipeline
        return (
            f"{reason} and divides them and --global-batch-size {job.global_batch_size}; {smallest.processes} of them "
            f"fit it ({smallest}): choose a multiple of {model_parallel} of them whose replicas divide the batch"
        )
    return f"{reason}; the smallest cluster that fits it has {smallest.processes} of them ({smallest})"


def smallest_layout(job: Job, cluster: Cluster) -> Layout | None:
    """Return the layout with the fewest devices that holds the model, divides the batch and fills whole nodes.

    It uses every way to save memory.
    """
    by_size = sorted(_frugal_layouts(job, cluster), key=lambda layout: (layout.processes, layout.data))
    return next((x for x in by_size if fits(memory_of(job, x, cluster), cluster)), None)


def _frugal_layouts(job: Job, cluster: Cluster) -> Iterator[Layout]:
    """Yield layouts of whole nodes with every way to save memory and with single samples as microbatches."""
    most = cluster.nvlink_domain or 2 * cluster.per_node
    sizes = [t for t in range(1, most + 1) if can_tensor_parallel(job, t)]
    # More replicas shard the optimizer's state further, or the parameters; experts are divided among them.
    some = max(MAX_REPLICAS, job.model.num_experts or 0)
    axes = itertools.product(sizes, pipeline_sizes(job), context_sizes(job, MAX_SHARDS))
    for t, p, context in axes:
        shards = can_shard_parameters(job, Layout())
        most = MAX_SHARDS if shards else some
        for data in (d for d in range(1, most + 1) if job.global_batch_size % d == 0):
            layout = Layout(
                tensor=t,
                context=context,
                pipeline=p,
                data=data,
                expert=max(e for e, parts in expert_sizes(job, data * context * t) if parts == 1),
                recompute="full",
                distributed_optimizer=data * context > 1,
                sharded_parameters=shards and data * context > 1,
            )
            if layout.processes <= cluster.per_node or layout.processes % cluster.per_node == 0:
                yield dataclasses.replace(layout, sequence_parallel=can_sequence_parallel(job, layout))
