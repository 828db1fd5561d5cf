"""Questions around a plan: what fits, what faster links or more memory would bring, how many GPUs a deadline needs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator

from megatron.errors import InputError
from megatron.planner.bounds import Bounds, KernelsOfLayouts
from megatron.planner.cluster import Cluster, Link, Measured
from megatron.planner.layout import Job, Layout
from megatron.planner.memory import fits
from megatron.planner.our_program import memory_of
from megatron.planner.search import Plan, plan_within
from megatron.planner.space import (
    context_sizes,
    expert_sizes,
    frugal,
    pipeline_sizes,
    tensor_sizes,
)
from megatron.reports.flops import exact_flops_per_sample

# Bounds of the answers.
MAX_LENGTH, MAX_MICRO_BATCH, MAX_GPUS = 2**30, 2**16, 10**6
# Sequences are compared in steps of so many tokens, or of what the layout divides them into.
LENGTH_STEP = 1024


def longest_sequence(job: Job, layout: Layout, cluster: Cluster) -> int:
    """Tokens of the longest sample that fits in a layout, with as many samples in a step; 0 if none does."""
    halves = 2 * layout.context if layout.context > 1 else 1
    step, near = LENGTH_STEP, 0
    while step % (halves * layout.tensor):
        step += LENGTH_STEP
    if layout.pipeline > 1 and layout.schedule_name == "auto":
        # Each length has a list of its own, which takes seconds to find. Named schedules need about as much memory.
        named = dataclasses.replace(layout, pipeline_schedule="zb-h1" if layout.chunks == 1 else "zb-v")
        near = longest_sequence(job, named, cluster) // step
    return step * _most(
        lambda steps: fits(memory_of(with_length(job, steps * step), layout, cluster), cluster),
        MAX_LENGTH // step,
        near,
    )


def with_length(job: Job, seq_length: int) -> Job:
    """A job with samples of another length."""
    longest = max(seq_length, job.model.max_position_embeddings)
    model = dataclasses.replace(job.model, max_position_embeddings=longest)
    return dataclasses.replace(job, model=model, seq_length=seq_length)


def largest_micro_batch(job: Job, layout: Layout, cluster: Cluster) -> int:
    """The largest microbatch that fits in a layout with as many microbatches; 0 if a single sample does not."""

    def does_fit(size: int) -> bool:
        other = dataclasses.replace(layout, micro_batch_size=size)
        batch = layout.data * size * layout.microbatches(job)
        return fits(memory_of(dataclasses.replace(job, global_batch_size=batch), other, cluster), cluster)

    return _most(does_fit, MAX_MICRO_BATCH)


def _most(holds: Callable[[int], bool], limit: int, near: int = 0) -> int:
    """The largest number up to a limit for which a condition holds that does not hold again above it; 0 if none.

    The search begins at a number near it.
    """
    below, above, stride = near, near + 1, 1
    while below > 0 and not holds(below):
        below, above, stride = max(0, below - stride), below, 2 * stride
    while near < above <= limit and holds(above):
        below, above, stride = above, above + stride, 2 * stride
    above = min(above, limit + 1)
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (middle, above) if holds(middle) else (below, middle)
    return below


def longest_of_all(job: Job, cluster: Cluster) -> tuple[int, Layout | None]:
    """Tokens of the longest sample that fits in any layout with as many samples in a step, and that layout."""
    best: tuple[int, Layout | None] = (0, None)
    for layout in _layouts_of_all_devices(job, cluster):
        longer = with_length(job, best[0] + LENGTH_STEP)
        if fits(memory_of(longer, layout, cluster), cluster):
            length = longest_sequence(job, layout, cluster)
            best = max(best, (length, layout), key=lambda found: found[0])
    return best


def _layouts_of_all_devices(job: Job, cluster: Cluster) -> Iterator[Layout]:
    """Yield layouts that save memory, with single samples as microbatches."""
    very_long = with_length(job, MAX_LENGTH)
    for t, p in itertools.product(tensor_sizes(job, cluster), pipeline_sizes(job)):
        ranks, rest = divmod(cluster.devices, t * p)
        for context in [] if rest else context_sizes(very_long, ranks):
            data = ranks // context
            if job.global_batch_size % data:
                continue
            experts = [(e, parts) for e, parts in expert_sizes(job, ranks * t) if parts in (1, t)]
            for expert, parts in experts:
                layout = Layout(
                    tensor=t,
                    context=context,
                    pipeline=p,
                    data=data,
                    expert=expert,
                    expert_tensor=parts,
                    overlap_grad_reduce=ranks > 1,
                )
                yield from frugal(very_long, layout)


def other_clusters(cluster: Cluster) -> Iterator[tuple[str, Cluster]]:
    """Yield clusters that differ in one quantity, which is twice as large, with the change in words."""
    device = cluster.device
    if cluster.devices > cluster.per_domain:
        yield "network twice as fast", dataclasses.replace(cluster, network=_faster(cluster.network))
    if min(cluster.per_domain, cluster.devices) > 1:
        measured = {name: link and _faster(link) for name, link in vars(cluster.measured).items()}
        yield (
            "links within a node twice as fast",
            dataclasses.replace(cluster, link=_faster(cluster.link), measured=Measured(**measured)),
        )
    for words, change in (
        ("memory twice as large", {"memory": 2 * device.memory}),
        ("memory twice as fast", {"bandwidth": 2 * device.bandwidth}),
        ("matrix products twice as fast", {"peak": 2 * device.peak, "fp8": device.fp8 and 2 * device.fp8}),
    ):
        yield words, dataclasses.replace(cluster, device=dataclasses.replace(device, **change))


def _faster(link: Link) -> Link:
    return dataclasses.replace(link, bandwidth=2 * link.bandwidth)


def fewest_gpus(
    job: Job, tokens: float, seconds: float, make_cluster: Callable[[int], Cluster], most: int = MAX_GPUS
) -> tuple[Cluster, Plan]:
    """The smallest cluster that trains on so many tokens in so many seconds, and its fastest plan.

    Sizes are those that a layout and the global batch divide, from the smallest on. A size is skipped only by a lower
    bound of the step's time: of the FLOPs at the devices' peak, or of all its layouts.

    Args:
        most: GPUs that a cluster can have.

    Raises:
        InputError: no cluster does.
    """
    limit = seconds / (tokens / (job.global_batch_size * job.seq_length))
    least = _least_seconds(job, make_cluster(1))
    kernels: dict[tuple[int, bool], KernelsOfLayouts] = {}
    for size in cluster_sizes(job):
        if size > most or least > size * limit:
            continue
        try:
            cluster = make_cluster(size)
        except InputError:  # not whole nodes
            continue
        # The links of a group depend on the domain, and not on how many there are.
        domain = cluster.per_domain, cluster.devices <= cluster.per_domain
        plan = plan_within(Bounds(job, cluster, kernels.setdefault(domain, {})), limit)
        if plan is not None:
            return cluster, plan
    whole, choice = "", "a larger --global-batch-size"
    if most < MAX_GPUS:
        whole, choice = ", the most without a file for --cluster,", "another --gpu"
    raise InputError(
        f"--days: no number of GPUs up to {most:,}{whole} ends a step of {job.global_batch_size} samples within "
        f"{limit:.2g} s; choose more days, or {choice}"
    )


def _least_seconds(job: Job, cluster: Cluster) -> float:
    """Seconds that a step takes on one device at the peak of its matrix products, with causal attention."""
    flops = exact_flops_per_sample(
        job.model,
        seq_length=job.seq_length,
        padded_vocab_size=job.vocab_size,
        num_logits=job.seq_length,
        causal=True,
    )
    peak = cluster.device.fp8 if job.fp8_format else None
    return job.global_batch_size * flops / (peak or cluster.device.peak)


def cluster_sizes(job: Job) -> list[int]:
    """Numbers of devices that replicas of the batch and a model-parallel layout divide."""
    batch = job.global_batch_size
    replicas = [d for d in range(1, batch + 1) if batch % d == 0]
    axes = itertools.product((1, 2, 4, 8), pipeline_sizes(job), context_sizes(job, 2**20))
    ranks = {t * p * c for t, p, c in axes}
    return sorted({d * r for d, r in itertools.product(replicas, ranks) if d * r <= MAX_GPUS})
