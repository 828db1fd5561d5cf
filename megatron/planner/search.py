"""Search the layouts of a job on a cluster: those that fit, and the fastest of them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator

from megatron.errors import InputError
from megatron.planner.cluster import Cluster
from megatron.planner.layout import Job, Layout
from megatron.planner.memory import USABLE_MEMORY, Memory, fits, max_memory
from megatron.planner.programs import OURS
from megatron.planner.simulate import Simulator, Step

# Larger numbers of chunks per stage, and other microbatch sizes, gain nothing.
MAX_CHUNKS, MICRO_BATCH_SIZES = 8, (1, 2, 4, 8, 16, 32)
# Experts are shared by more ranks only within a node.
EXPERT_TENSOR_SIZES = (1, 2, 4, 8)
# Estimates may be in another order than the clock's results: this many times the layouts asked for are simulated.
SIMULATED_PER_PLAN = 3
# For the smallest cluster: more replicas save hardly any memory.
MAX_REPLICAS = 16


@dataclasses.dataclass(frozen=True)
class Plan:
    """A layout that fits, with its predicted step and the memory of the process that needs most."""

    layout: Layout
    step: Step
    memory: Memory


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """The best plans, the fastest first, and how many layouts were timed or did not fit."""

    plans: list[Plan]
    timed: int
    too_large: int


def make_plan(job: Job, layout: Layout, cluster: Cluster) -> Plan:
    """Predict one layout."""
    step = Simulator(job, layout, cluster, OURS).step()
    return Plan(layout, step, max_memory(job, layout, cluster, OURS))


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


def can_sequence_parallel(job: Job, tensor: int) -> bool:
    """Return True if sequence parallelism is possible over `tensor` ranks."""
    return tensor > 1 and job.seq_length % tensor == 0


def shapes(job: Job, cluster: Cluster) -> Iterator[Layout]:
    """Yield the axis sizes, chunks and microbatch sizes that divide job and cluster."""
    model = job.model
    for t, p in itertools.product(tensor_sizes(job, cluster), pipeline_sizes(job)):
        if cluster.devices % (t * p):
            continue
        data = cluster.devices // (t * p)
        for b in MICRO_BATCH_SIZES:
            if job.global_batch_size % (data * b):
                continue
            m = job.global_batch_size // (data * b)
            max_chunks = MAX_CHUNKS if p > 1 and m % p == 0 else 1
            chunks = [v for v in range(1, max_chunks + 1) if v == 1 or model.num_layers % (p * v) == 0]
            for v, (expert, expert_tensor) in itertools.product(chunks, expert_sizes(job, data * t)):
                yield Layout(
                    tensor=t,
                    pipeline=p,
                    data=data,
                    expert=expert,
                    expert_tensor=expert_tensor,
                    chunks=v,
                    micro_batch_size=b,
                    overlap_grad_reduce=data > 1,
                )


def variants(shape: Layout, job: Job) -> Iterator[Layout]:
    """Yield a shape with and without each way to save memory.

    Selective recomputation is left out: fused attention has no scores for it to save.
    """
    parallel = (False, True) if can_sequence_parallel(job, shape.tensor) else (False,)
    for recompute in ("none", "full"):
        for sequence_parallel in parallel:
            for sharded in (False, True) if shape.data > 1 else (False,):
                yield dataclasses.replace(
                    shape,
                    recompute=recompute,
                    sequence_parallel=sequence_parallel,
                    distributed_optimizer=sharded,
                )


def search(job: Job, cluster: Cluster, *, num_plans: int, progress: Callable[[int], object]) -> SearchResult:
    """Find the fastest layouts that fit; each shape counts with its fastest variant.

    Args:
        progress: called after each shape with the number of layouts examined so far.

    Raises:
        InputError: no layout divides the job, or none fits; the message names the smallest sufficient cluster.
    """
    estimates: list[tuple[float, int, Layout]] = []
    too_large = timed = 0
    for shape in shapes(job, cluster):
        best: tuple[float, Layout] | None = None
        for layout in variants(shape, job):
            if not fits(max_memory(job, layout, cluster, OURS), cluster):
                too_large += 1
                continue
            timed += 1
            seconds = Simulator(job, layout, cluster, OURS).estimate()
            if best is None or seconds < best[0]:
                best = (seconds, layout)
        if best is not None:
            estimates.append((best[0], len(estimates), best[1]))
        progress(timed + too_large)
    if not estimates:
        raise InputError(_nothing_fits(job, cluster, too_large))
    likely = [layout for _, _, layout in sorted(estimates)[: SIMULATED_PER_PLAN * num_plans]]
    plans = sorted((make_plan(job, layout, cluster) for layout in likely), key=lambda plan: plan.step.seconds)
    return SearchResult(plans[:num_plans], timed, too_large)


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

    It uses every way to save memory. More replicas shard the optimizer's state further, and nothing else.
    """
    found = []
    sizes = [t for t in range(1, cluster.per_domain + 1) if can_tensor_parallel(job, t)]
    # The experts of a mixture need replicas to be divided among.
    most = max(MAX_REPLICAS, job.model.num_experts or 0)
    replicas = [d for d in range(1, most + 1) if job.global_batch_size % d == 0]
    for t, p, data in itertools.product(sizes, pipeline_sizes(job), replicas):
        layout = Layout(
            tensor=t,
            pipeline=p,
            data=data,
            expert=max(e for e, parts in expert_sizes(job, data * t) if parts == 1),
            recompute="full",
            sequence_parallel=can_sequence_parallel(job, t),
            distributed_optimizer=data > 1,
        )
        fills_nodes = layout.processes <= cluster.per_node or layout.processes % cluster.per_node == 0
        full_pipeline = dataclasses.replace(job, global_batch_size=data * p)
        if fills_nodes and fits(max_memory(full_pipeline, layout, cluster, OURS), cluster):
            found.append(layout)
    return min(found, key=lambda layout: (layout.processes, layout.data), default=None)
