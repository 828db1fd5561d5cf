"""Search the layouts of a job on a cluster: those that fit, and the fastest of them."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from megatron.errors import InputError
from megatron.planner.bounds import Bounds
from megatron.planner.cluster import Cluster
from megatron.planner.host_copies import USABLE_HOST
from megatron.planner.layout import Job, Layout
from megatron.planner.memory import Memory, fits, usable_memory
from megatron.planner.our_program import fits_memory, memory_of, simulator_of, state_fits
from megatron.planner.simulate import Step
from megatron.planner.space import (
    can_offload_activations,
    can_offload_optimizer,
    can_route,
    can_tensor_parallel,
    context_sizes,
    count_variants,
    expert_sizes,
    frugal,
    pipeline_sizes,
    shapes,
    tensor_sizes,
    variants,
)

# Forward passes of a step up to which the schedule auto is tried.
MAX_AUTO_PASSES = 1024
# Replicas of the smallest cluster: more save hardly any memory.
MAX_SHARDS = 1024


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
        too_large: number of those found not to fit without offload.
    """

    plans: list[Plan]
    layouts: int
    timed: int
    too_large: int


def make_plan(job: Job, layout: Layout, cluster: Cluster) -> Plan:
    """Predict one layout."""
    step = simulator_of(job, layout, cluster).step()
    return Plan(layout, step, memory_of(job, layout, cluster))


def search(
    job: Job,
    cluster: Cluster,
    *,
    num_plans: int,
    progress: Callable[[int], object],
    among: Iterable[Layout] | None = None,
) -> SearchResult:
    """Find the fastest layouts that fit; each shape counts with its fastest variant.

    Those that do not fit are tried with recomputation. Only if no layout fits so, all are tried with offload to host
    memory, since the speed of copies is not measured.

    Args:
        progress: called with the number of layouts examined so far.
        among: shapes to choose from; None for all `shapes`.

    Raises:
        InputError: no layout divides the job, or none fits; the message names the smallest sufficient cluster.
    """
    among = list(shapes(job, cluster) if among is None else among)
    bounds = Bounds(job, cluster)
    result = _fastest(bounds, among, num_plans, progress, host=False)
    if not result.plans:
        with_host = _fastest(bounds, among, num_plans, progress, host=True)
        result = dataclasses.replace(with_host, too_large=result.too_large)
    if not result.plans:
        raise InputError(_nothing_fits(job, cluster, result.too_large))
    return result


def plan_within(bounds: Bounds, seconds: float) -> Plan | None:
    """Return the plan that `search` finds if its step takes at most so many seconds."""

    def find(*, host: bool) -> SearchResult:
        return _fastest(bounds, among, 1, lambda count: None, host=host, limit=just_above)

    job, cluster = bounds.job, bounds.cluster
    # Bounds sum in another order than steps, so that they may exceed them by rounding.
    among, just_above = list(shapes(job, cluster)), seconds * (1 + 1e-9)
    result = find(host=False)
    if not result.plans:
        if not result.too_large or not find(host=True).plans:
            return None
        # A search offloads only if no layout fits without it, however slow.
        result = search(job, cluster, num_plans=1, progress=lambda count: None)
    plan = result.plans[0]
    return plan if plan.step.seconds <= seconds else None


def _fastest(
    bounds: Bounds,
    among: Sequence[Layout],
    num_plans: int,
    progress: Callable[[int], object],
    *,
    host: bool,
    limit: float = math.inf,
) -> SearchResult:
    """Find the fastest of some shapes, with `host` also with offload to host memory.

    Their steps take less than `limit` seconds.

    Layouts are simulated in the order of a lower bound of their time, until that of the next exceeds the time of the
    plans found: the result is that of simulating all.
    """
    job, cluster = bounds.job, bounds.cluster
    # Each layout comes up with ever closer bounds, so that those of most are not computed.
    queue: list[tuple[float, int, str, Layout, Layout]] = []
    considered = too_large = timed = 0
    numbers = itertools.count()

    def push(seconds: float, kind: str, layout: Layout, shape: Layout) -> None:
        heapq.heappush(queue, (seconds, next(numbers), kind, layout, shape))

    for shape in among:
        considered += count_variants(shape, job, cluster)
        push(bounds.of_shape(shape), "shape", shape, shape)
        progress(considered)
    best: dict[Layout, Plan] = {}
    while queue and queue[0][0] < limit:
        _, _, kind, layout, shape = heapq.heappop(queue)
        if kind == "shape":
            for variant in variants(shape, job, cluster, ("none",)):
                push(bounds.of_pipeline(variant), "pipeline", variant, shape)
            continue
        if kind == "pipeline":
            if not state_fits(job, layout, cluster):
                too_large += 2
                layout = dataclasses.replace(layout, offload_optimizer=True)
                if not (host and can_offload_optimizer(layout) and state_fits(job, layout, cluster)):
                    continue
            push(bounds.of_step(layout), "step", layout, shape)
            continue
        if not fits_memory(job, layout, cluster):
            too_large += 1
            for other in _thriftier(layout, job, cluster, host=host):
                push(bounds.of_step(other), "step", other, shape)
            continue
        timed += 1
        plan = Plan(layout, bounds.simulator(layout).step(), memory_of(job, layout, cluster))
        if plan.step.seconds < min(limit, best[shape].step.seconds if shape in best else math.inf):
            best[shape] = plan
            times = sorted(plan.step.seconds for plan in best.values())
            limit = times[num_plans - 1] if len(times) >= num_plans else limit
    plans = sorted(best.values(), key=lambda plan: plan.step.seconds)
    return SearchResult(plans[:num_plans], considered, timed, too_large)


def _thriftier(layout: Layout, job: Job, cluster: Cluster, *, host: bool) -> Iterator[Layout]:
    """Yield layouts with less memory and more time than one that does not fit."""
    if layout.recompute != "none" or layout.offload_layers != 0:
        return
    if not host or layout.offload_optimizer:
        yield dataclasses.replace(layout, recompute="full")
    elif can_offload_optimizer(layout):
        yield dataclasses.replace(layout, offload_optimizer=True)
    if host:
        yield from fewest_layers(layout, job, cluster)


def fewest_layers(layout: Layout, job: Job, cluster: Cluster) -> Iterator[Layout]:
    """Yield a layout with the fewest layers whose activations have to leave for it to fit, if there are any."""
    if not can_offload_activations(layout):
        return
    all_of_them = dataclasses.replace(layout, offload_layers=None)

    def with_layers(number: int) -> Layout:
        return dataclasses.replace(layout, offload_layers=number)

    # To offload the last layer of a chunk, too, takes more memory where few microbatches are in flight.
    low, high = 0, max(sum(chunk) for stage in layout.layers(job) for chunk in stage) - 1
    if high < 1 or not fits_memory(job, with_layers(high), cluster):
        if fits_memory(job, all_of_them, cluster):
            yield all_of_them
        return
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits_memory(job, with_layers(middle), cluster) else (middle, high)
    yield with_layers(high)


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
    usable = usable_memory(cluster) / 1e9
    reason = (
        f"no layout fits this model on {devices} {cluster.device.name} with {usable:.3g} GB usable on each"
    )
    if cluster.host.memory is not None:
        reason += f" and {USABLE_HOST * cluster.host.memory / 1e9:.3g} GB of host memory"
    if smallest is None:
        return (
            f"{reason}, nor on more of them: a single layer with a sample of {job.seq_length:,} tokens is too "
            "large; choose devices with more memory, or a shorter --seq-length"
        )
    if smallest.processes <= devices:
        model_parallel = smallest.tensor * smallest.pipeline
        return (
            f"{reason} and divides them and --global-batch-size {job.global_batch_size}; {smallest.processes} of them "
            f"fit it ({smallest}): choose a multiple of {model_parallel} of them whose replicas divide the batch"
        )
    # A data sheet without a standard node has no network.
    beyond = smallest.processes > cluster.per_node and not cluster.network.bandwidth
    described = ", in nodes that a file for --cluster describes" if beyond else ""
    return f"{reason}; the smallest cluster that fits it has {smallest.processes} of them ({smallest}){described}"


def smallest_layout(job: Job, cluster: Cluster) -> Layout | None:
    """Return the layout with the fewest devices that holds the model, divides the batch and fills whole nodes.

    It uses every way to save memory.
    """
    by_size = sorted(
        _layouts_of_whole_nodes(job, cluster), key=lambda layout: (layout.processes, layout.data)
    )
    return next((x for x in by_size if fits(memory_of(job, x, cluster), cluster)), None)


def _layouts_of_whole_nodes(job: Job, cluster: Cluster) -> Iterator[Layout]:
    """Yield layouts that save memory, with single samples as microbatches."""
    most = cluster.nvlink_domain or 2 * cluster.per_node
    sizes = [t for t in range(1, most + 1) if can_tensor_parallel(job, t)]
    # More replicas shard the state and the parameters further, and divide the experts.
    axes = itertools.product(sizes, pipeline_sizes(job), context_sizes(job, MAX_SHARDS))
    for t, p, context in axes:
        for data in (d for d in range(1, MAX_SHARDS + 1) if job.global_batch_size % d == 0):
            layout = Layout(tensor=t, context=context, pipeline=p, data=data)
            fills = layout.processes <= cluster.per_node or layout.processes % cluster.per_node == 0
            if fills and can_route(job, layout):
                expert = max(e for e, parts in expert_sizes(job, data * context * t) if parts == 1)
                yield from frugal(job, dataclasses.replace(layout, expert=expert))
