"""All layouts of a job on a cluster: which fit, how fast they are, and what would be lost by another choice."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator

from megatron.flags import InputError
from megatron.model.config import ModelConfig
from megatron.planner.cluster import Cluster
from megatron.planner.layout import OURS, Job, Layout
from megatron.planner.memory import USABLE, Memory, fits, most_memory
from megatron.planner.simulate import Simulator, Step

# Chunks of a stage, and samples of a microbatch, beyond which nothing is gained.
MOST_CHUNKS, MICRO_BATCH_SIZES = 8, (1, 2, 4, 8, 16, 32)
# Of the layouts by the estimate, so many more than asked for are walked with the clock, as the order may change.
WALKED = 3
# Of the smallest cluster: beyond them a process keeps hardly less.
MOST_REPLICAS = 16


@dataclasses.dataclass(frozen=True)
class Plan:
    """A layout that fits, and what is predicted of it. `memory` is that of the process with the most."""

    layout: Layout
    step: Step
    memory: Memory


@dataclasses.dataclass(frozen=True)
class Found:
    """What a search found: the best plans, the fastest first, and how many layouts were timed or did not fit."""

    plans: list[Plan]
    timed: int
    too_large: int


def make_plan(job: Job, layout: Layout, cluster: Cluster) -> Plan:
    """Predict one layout."""
    step = Simulator(job, layout, cluster, OURS).step()
    return Plan(layout, step, most_memory(job, layout, cluster, OURS))


def divisors(n: int) -> list[int]:
    return [i for i in range(1, n + 1) if n % i == 0]


def tensor_sizes(job: Job, cluster: Cluster) -> list[int]:
    """Sizes of tensor parallelism that divide the model, up to two nodes: what it communicates in every layer is more
    than links between nodes carry in time (2104.04473 section 5.4.1), which a size beyond one node shows."""
    sizes = divisors(job.model.num_attention_heads)
    return [
        t for t in sizes if t <= 2 * cluster.per_node and cluster.devices % t == 0 and divides(t, job.model)
    ]


def divides(tensor: int, model: ModelConfig) -> bool:
    """Whether so many tensor-parallel processes can share a layer."""
    heads, groups = model.num_attention_heads, model.num_query_groups
    whole_groups = groups % tensor == 0 or tensor % groups == 0
    return heads % tensor == 0 and model.ffn_hidden_size % tensor == 0 and whole_groups


def divides_sequence(tensor: int, job: Job) -> bool:
    """Whether there is sequence parallelism among so many tensor-parallel processes."""
    return tensor > 1 and job.seq_length % tensor == 0


def shapes(job: Job, cluster: Cluster) -> Iterator[Layout]:
    """The layouts that divide the job and the cluster, as far as axes, chunks and microbatch go."""
    model = job.model
    for t, p in itertools.product(tensor_sizes(job, cluster), divisors(model.num_layers)):
        if cluster.devices % (t * p):
            continue
        data = cluster.devices // (t * p)
        for b in MICRO_BATCH_SIZES:
            if job.global_batch_size % (data * b):
                continue
            m = job.global_batch_size // (data * b)
            most = MOST_CHUNKS if p > 1 and m % p == 0 else 1
            for v in divisors(model.num_layers // p):
                if v <= most:
                    yield Layout(
                        tensor=t,
                        pipeline=p,
                        data=data,
                        chunks=v,
                        micro_batch_size=b,
                        overlap_grad_reduce=data > 1,
                    )


def variants(shape: Layout, job: Job) -> Iterator[Layout]:
    """A shape with and without what saves memory. Selective recomputation is left out: with fused attention there
    are no scores for it to save."""
    parallel = (False, True) if divides_sequence(shape.tensor, job) else (False,)
    for recompute in ("none", "full"):
        for sequence_parallel in parallel:
            for sharded in (False, True) if shape.data > 1 else (False,):
                yield dataclasses.replace(
                    shape,
                    recompute=recompute,
                    sequence_parallel=sequence_parallel,
                    distributed_optimizer=sharded,
                )


def search(job: Job, cluster: Cluster, *, wanted: int, progress: Callable[[int], None]) -> Found:
    """The fastest layouts that fit, of each shape the fastest variant.

    Args:
        progress: told after each shape how many layouts have been looked at.

    Raises:
        InputError: none divides the job, or none fits; with the smallest cluster that would do.
    """
    estimates: list[tuple[float, int, Layout]] = []
    too_large = timed = 0
    for shape in shapes(job, cluster):
        best: tuple[float, Layout] | None = None
        for layout in variants(shape, job):
            if not fits(most_memory(job, layout, cluster, OURS), cluster):
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
    likely = [layout for _, _, layout in sorted(estimates)[: WALKED * wanted]]
    plans = sorted((make_plan(job, layout, cluster) for layout in likely), key=lambda plan: plan.step.seconds)
    return Found(plans[:wanted], timed, too_large)


def _nothing_fits(job: Job, cluster: Cluster, too_large: int) -> str:
    """Why there is no layout, and what would be right."""
    least, devices = smallest(job, cluster), cluster.devices
    if not too_large and least is not None and least.processes <= devices:
        # A replica has as many of the batch's samples as the others.
        sizes = itertools.product(tensor_sizes(job, cluster), divisors(job.model.num_layers))
        replicas = min(devices // (t * p) for t, p in sizes if devices % (t * p) == 0)
        below = job.global_batch_size // replicas * replicas
        nearest = f"{below} or {below + replicas}" if below else f"{replicas}"
        return (
            f"--global-batch-size: no layout divides {job.global_batch_size} samples, --num-layers "
            f"{job.model.num_layers} and --num-attention-heads {job.model.num_attention_heads} over {devices} devices; "
            f"with {nearest} samples there is one, or choose another number of devices"
        )
    room = USABLE * cluster.device.memory / 1e9
    told = f"no layout on {devices} {cluster.device.name} holds this model in {room:.3g} GB each"
    if least is None:
        return f"{told}, nor on more of them: a layer alone is too large; choose devices with more memory"
    return f"{told}; the smallest cluster that would is {least.processes} of them ({least})"


def smallest(job: Job, cluster: Cluster) -> Layout | None:
    """The layout of the fewest devices that holds the model, divides the batch and fills nodes, with all that saves
    memory. More replicas hold less of the optimizer's state each, and the rest as often."""
    found = []
    sizes = [t for t in range(1, cluster.per_node + 1) if divides(t, job.model)]
    replicas = [d for d in range(1, MOST_REPLICAS + 1) if job.global_batch_size % d == 0]
    for t, p, data in itertools.product(sizes, divisors(job.model.num_layers), replicas):
        layout = Layout(
            tensor=t,
            pipeline=p,
            data=data,
            recompute="full",
            sequence_parallel=divides_sequence(t, job),
            distributed_optimizer=data > 1,
        )
        fills = layout.processes <= cluster.per_node or layout.processes % cluster.per_node == 0
        busy = dataclasses.replace(job, global_batch_size=data * p)
        if fills and fits(most_memory(busy, layout, cluster, OURS), cluster):
            found.append(layout)
    return min(found, key=lambda layout: (layout.processes, layout.data), default=None)
