"""Explain a plan: the cost of each other choice, and the paper's advice with the numbers of this case."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from megatron.planner.budget import many, percent
from megatron.planner.cluster import Cluster
from megatron.planner.host_copies import USABLE_HOST
from megatron.planner.layout import Job, Layout
from megatron.planner.memory import fits, usable_memory
from megatron.planner.our_program import memory_of
from megatron.planner.schedule_costs import bubble_fraction
from megatron.planner.search import Plan, fewest_layers, make_plan
from megatron.planner.space import (
    MICRO_BATCH_SIZES,
    can_offload_activations,
    can_offload_optimizer,
    can_post_validate,
    can_route,
    can_sequence_parallel,
    can_shard_parameters,
    can_tensor_parallel,
    divides_experts,
    divides_layers,
    schedules,
)

# Fields of `Step` in words.
PARTS = {
    "matmul": "matrix products",
    "elementwise": "memory-bound operations",
    "tensor_parallel": "tensor-parallel communication",
    "expert_parallel": "expert-parallel communication",
    "context_parallel": "context-parallel communication",
    "ends": "embedding and output layer, which slow down their stages",
    "bubble": "the pipeline bubble",
    "gradients": "data-parallel communication",
    "optimizer": "the optimizer step",
    "host_copies": "copies of activations to host memory",
}
# Relative differences of step time below this count as equal: predictions do not tell such layouts apart.
EQUAL_TIME = 0.01
# Fields of a layout whose replicas shard nothing but the optimizer state.
UNSHARDED: dict[str, Any] = {
    "distributed_optimizer": True,
    "sharded_gradients": False,
    "sharded_parameters": False,
    "instances": 1,
}
# Those of stages that have equal numbers of layers.
EVEN: dict[str, Any] = {"balanced": False, "division": None}


def other_choices(best: Plan, job: Job, cluster: Cluster) -> Iterator[tuple[str, Layout]]:
    """Yield the layouts that differ from the best in one choice, with the choice in words.

    Layouts that do not divide job or cluster are left out.
    """
    layout = best.layout
    t, p, d, b = layout.tensor, layout.pipeline, layout.data, layout.micro_batch_size
    c, e, parts = layout.context, layout.expert, layout.expert_tensor
    changes: list[tuple[str, dict[str, Any]]] = [
        (f"T{2 * t} P{p // 2}", {"tensor": 2 * t, "pipeline": p // 2}),
        (f"T{t // 2} P{2 * p}", {"tensor": t // 2, "pipeline": 2 * p}),
        (f"T{2 * t} D{d // 2}", {"tensor": 2 * t, "data": d // 2}),
        (f"T{t // 2} D{2 * d}", {"tensor": t // 2, "data": 2 * d}),
        (f"P{2 * p} D{d // 2}", {"pipeline": 2 * p, "data": d // 2}),
        (f"P{p // 2} D{2 * d}", {"pipeline": p // 2, "data": 2 * d}),
        (f"C{2 * c} D{d // 2}", {"context": 2 * c, "data": d // 2}),
        (f"C{c // 2} D{2 * d}", {"context": c // 2, "data": 2 * d}),
        (f"E{2 * e}", {"expert": 2 * e}),
        (f"E{e // 2}", {"expert": e // 2}),
        (f"E{2 * e} of T{parts // 2}", {"expert": 2 * e, "expert_tensor": parts // 2}),
        (f"E{e // 2} of T{2 * parts}", {"expert": e // 2, "expert_tensor": 2 * parts}),
        ("no interleaving", {"chunks": 1}),
        ("1F1B or interleaving", {"pipeline_schedule": None}),
        ("schedule zb-h1", {"pipeline_schedule": "zb-h1", "chunks": 1}),
        ("schedule zb-v", {"pipeline_schedule": "zb-v", "chunks": 2, "balanced": False}),
        *([("stages of equal numbers of layers", EVEN)] if Layout(pipeline=p).splits_layers(job) else []),
        ("stages of equal work", {"balanced": True, "division": None, "chunks": 1}),
        (f"microbatch {2 * b}", {"micro_batch_size": 2 * b}),
        (f"microbatch {b // 2}", {"micro_batch_size": b // 2}),
        ("no recomputation", {"recompute": "none"}),
        ("full recomputation", {"recompute": "full"}),
        ("no sequence parallelism", {"sequence_parallel": False}),
        ("sequence parallelism", {"sequence_parallel": True}),
        ("no distributed optimizer", UNSHARDED | {"distributed_optimizer": False}),
        ("distributed optimizer", UNSHARDED),
        ("sharded gradients", UNSHARDED | {"sharded_gradients": True}),
        ("sharded parameters", UNSHARDED | {"sharded_parameters": True}),
        ("overlapped gradient reduction", {"overlap_grad_reduce": True}),
        ("overlapped parameter gather", {"overlap_param_gather": True}),
        ("no post-validation", {"post_validation": False}),
        ("post-validation", {"post_validation": True, "offload_optimizer": False}),
        ("optimizer state on the device", {"offload_optimizer": False}),
        ("activations on the device", {"offload_layers": 0}),
        *([] if fits(best.memory, cluster) else offloads(layout)),
        *in_place_of_recomputation(layout, job, cluster),
    ]
    # A layout that cannot overlap the reduction does not say if another should.
    overlap = layout.overlap_grad_reduce or layout.replicas == 1 or layout.splits_backward
    seen = [layout]
    for words, change in changes:
        other = dataclasses.replace(layout, **{"overlap_grad_reduce": overlap} | change)
        if (other.pipeline, other.chunks) != (layout.pipeline, layout.chunks):
            other = dataclasses.replace(other, division=None)
        # Other microbatch sizes are those of the search.
        if other.micro_batch_size not in (b, *MICRO_BATCH_SIZES) or not _divides(other, job, cluster):
            continue
        other = _adjusted(other, job)
        if other not in seen:
            seen.append(other)
            yield words, other


def offloads(layout: Layout) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield ways to use host memory for a layout that does not fit without, in words and as changes."""
    if can_offload_activations(layout) and layout.offload_layers == 0:
        yield "all activations in host memory", {"offload_layers": None}
    if not layout.offload_optimizer and can_offload_optimizer(layout):
        yield "optimizer state in host memory", {"offload_optimizer": True}


def in_place_of_recomputation(
    layout: Layout, job: Job, cluster: Cluster
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the offload of as many layers as have to leave without recomputation, in words and as a change."""
    if layout.recompute == "full":
        without = dataclasses.replace(layout, recompute="none")
        for other in fewest_layers(without, job, cluster):
            number = "all" if other.offload_layers is None else other.offload_layers
            change = {"recompute": "none", "offload_layers": other.offload_layers}
            yield f"{number} layers in host memory instead", change


def _divides(layout: Layout, job: Job, cluster: Cluster) -> bool:
    if min(layout.tensor, layout.context, layout.pipeline, layout.data) < 1:
        return False
    halves = 2 * layout.context if layout.context > 1 else 1  # of a sequence
    return (
        layout.processes == cluster.devices
        and (layout.division is not None or divides_layers(job, dataclasses.replace(layout, chunks=1)))
        and can_tensor_parallel(job, layout.tensor)
        and job.seq_length % halves == 0
        and can_route(job, layout)
        and divides_experts(layout, job)
        and job.global_batch_size % (layout.data * layout.micro_batch_size) == 0
    )


def _adjusted(layout: Layout, job: Job) -> Layout:
    """Reduce the chunks to what layers and microbatches allow, and drop options without effect."""
    p, chunks = layout.pipeline, 1
    if p > 1:
        fitting = (dataclasses.replace(layout, chunks=v) for v in range(1, layout.chunks + 1))
        possible = [other.chunks for other in fitting if _is_possible(job, other)]
        if not possible:
            layout, possible = dataclasses.replace(layout, pipeline_schedule=None), [1]
        chunks = max(possible)
    if chunks != layout.chunks:
        layout = dataclasses.replace(layout, division=None)
    if p == 1:
        layout = dataclasses.replace(layout, pipeline_schedule=None)
    validated = layout.post_validation and can_post_validate(job, dataclasses.replace(layout, chunks=chunks))
    layout = dataclasses.replace(layout, chunks=chunks, post_validation=validated)
    replicated = layout.replicas > 1
    shards = replicated and can_shard_parameters(layout)
    sharded = shards and (layout.sharded_gradients or layout.sharded_parameters)
    divides = layout.replicas % layout.instances == 0 and layout.replicas > layout.instances
    return dataclasses.replace(
        layout,
        balanced=p > 1 and (layout.balanced or not (layout.division or layout.splits_layers(job))),
        offload_layers=layout.offload_layers if can_offload_activations(layout) else 0,
        sequence_parallel=layout.sequence_parallel and can_sequence_parallel(job, layout),
        distributed_optimizer=layout.distributed_optimizer and replicated,
        sharded_gradients=layout.sharded_gradients and shards,
        sharded_parameters=layout.sharded_parameters and shards,
        instances=layout.instances if sharded and divides else 1,
        overlap_grad_reduce=layout.overlap_grad_reduce and replicated and not layout.splits_backward,
    )


def _is_possible(job: Job, layout: Layout) -> bool:
    """Return True if the schedule of a layout runs with its chunks; a search does not have all that are given."""
    name, several = layout.pipeline_schedule, layout.chunks > 1
    alike = {"gpipe": None, "breadth-first": None, "auto": "zb-v" if several else None}.get(name or "", name)
    if (name == "gpipe" and several) or (name == "breadth-first" and not several):
        return False
    if alike in schedules(job, layout):
        return True
    # Given stages may be uneven where no even ones are possible.
    uneven = (layout.balanced or layout.division is not None) and not layout.splits_layers(job)
    if several:
        return uneven and alike is None and layout.microbatches(job) % layout.pipeline == 0
    return uneven and alike in (None, "zb-h1", "zb-h2")


def why_not(other: Layout, best: Plan, job: Job, cluster: Cluster) -> str:
    """Say how much slower another layout is than the best and why, or that it does not fit."""
    memory = memory_of(job, other, cluster)
    usable, host = usable_memory(cluster), cluster.host.memory
    if memory.total > usable:
        return f"does not fit: needs {memory.total / 1e9:.1f} GB of {usable / 1e9:.1f}"
    if host is not None and memory.host > USABLE_HOST * host:
        return f"does not fit: needs {memory.host / 1e9:.1f} GB of host memory, of {USABLE_HOST * host / 1e9:.1f}"
    return slower_by(make_plan(job, other, cluster), best)


def slower_by(plan: Plan, best: Plan) -> str:
    """Say how much longer a plan's step takes than another's, and where most of the difference is."""
    slower = plan.step.seconds / best.step.seconds - 1
    if slower < -EQUAL_TIME:
        return f"{percent(-slower)} faster; needs {plan.memory.total / 1e9:.0f} GB"
    if slower < EQUAL_TIME:
        return f"as fast; needs {plan.memory.total / 1e9:.0f} GB"
    more = {name: getattr(plan.step, name) - getattr(best.step, name) for name in PARTS}
    worst = max(more, key=lambda name: more[name])
    recompute = plan.step.recompute - best.step.recompute
    reason = "recomputation" if recompute > 0.5 * more[worst] else PARTS[worst]
    return f"{percent(slower)} slower: {reason}"


def takeaways(best: Plan, job: Job, cluster: Cluster) -> list[str]:
    """The advice of 2104.04473 section 3 with the numbers of this case, one paragraph each."""
    layout, step = best.layout, best.step
    t, p, d = layout.tensor, layout.pipeline, layout.data
    m = layout.microbatches(job)
    share = {name: getattr(step, name) / step.seconds for name in (*PARTS, "recompute")}
    joined = min(cluster.per_domain, cluster.devices)
    usable = usable_memory(cluster) / 1e9
    paragraphs = [
        f"Tensor parallelism within a node, pipeline parallelism across nodes (takeaway 1). Links join "
        f"{many(joined, 'device')}; T{t} {'stays' if t <= joined else 'is not'} within them, and its communication "
        f"takes {percent(share['tensor_parallel'])} of the step"
        + (f"; {p} stages share the layers." if p > 1 else "; the model needs no pipeline."),
        f"Model parallelism until the model fits, data parallelism beyond (takeaway 2). The model is split over "
        f"{many(t * p, 'device')} and needs {best.memory.total / 1e9:.0f} GB of {usable:.0f} usable each; "
        f"the batch is divided over {many(d, 'replica')}, whose communication takes {percent(share['gradients'])} of "
        "the step.",
    ]
    if p > 1:
        bubble, simulation = percent(bubble_fraction(p, 1, m)), "in simulation"
        if layout.schedule_name == "interleaved":
            bubble += (
                f", which {layout.chunks} chunks per stage reduce to "
                f"{percent(bubble_fraction(p, layout.chunks, m))} at {layout.chunks} times the transfers"
            )
        elif layout.schedule_name != "1f1b":
            bubble, simulation = f"{bubble} with 1F1B", f"in simulation with {layout.schedule_name}"
        paragraphs.append(
            f"The bubble (section 2.2): with {p} stages and {m} microbatches, (p - 1) / m = {bubble}; {simulation} a "
            f"stage idles for {percent(share['bubble'])} of the step."
        )
    paragraphs.append(
        f"The best microbatch size depends on the case (takeaway 3): larger microbatches make matrix products faster, "
        f"but fewer of them make the bubble larger. Here it is {layout.micro_batch_size}, with "
        f"{many(m, 'microbatch', 'microbatches')} per replica."
    )
    return [*paragraphs, f"Recomputation (section 3.5): {_recomputation(layout, share['recompute'])}."]


def _recomputation(layout: Layout, share: float) -> str:
    """Say what a layout recomputes and why, given the share of the step that this takes."""
    if layout.recompute != "none":
        return (
            f"{percent(share)} of the step. Without it the activations do not fit, or only with a smaller, slower "
            "microbatch"
        )
    if layout.offload_layers == 0:
        return "not needed, the activations fit"
    layers = "all layers" if layout.offload_layers is None else many(layout.offload_layers, "layer")
    return f"not used, activations of {layers} go to host memory"
