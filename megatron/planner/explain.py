"""Why a plan is the best: what each other choice would cost, and the paper's takeaways for this case."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from megatron.parallel.schedules import bubble_fraction
from megatron.planner.cluster import Cluster
from megatron.planner.layout import OURS, Job, Layout
from megatron.planner.memory import USABLE, fits, most_memory
from megatron.planner.search import (
    MICRO_BATCH_SIZES,
    MOST_CHUNKS,
    Plan,
    divides,
    divides_sequence,
    divisors,
    make_plan,
)

# Parts of a step in words.
PARTS = {
    "products": "matrix products",
    "elements": "operations bound by memory",
    "tensor": "communication of tensor parallelism",
    "ends": "embeddings and output layer, which hold up their stage",
    "bubble": "the pipeline's bubble",
    "gradients": "gradients and weights between replicas",
    "optimizer": "the optimizer's step",
}
# A difference of a step's time that is none.
AS_FAST = 0.002


def other_choices(best: Plan, job: Job, cluster: Cluster) -> Iterator[tuple[str, Layout]]:
    """What differs from the best layout in one choice, in words and whole; those that divide the job and the
    cluster."""
    layout = best.layout
    t, p, d, b = layout.tensor, layout.pipeline, layout.data, layout.micro_batch_size
    changes: list[tuple[str, dict[str, object]]] = [
        (f"T{2 * t} P{p // 2}", {"tensor": 2 * t, "pipeline": p // 2}),
        (f"T{t // 2} P{2 * p}", {"tensor": t // 2, "pipeline": 2 * p}),
        (f"T{2 * t} D{d // 2}", {"tensor": 2 * t, "data": d // 2}),
        (f"T{t // 2} D{2 * d}", {"tensor": t // 2, "data": 2 * d}),
        (f"P{2 * p} D{d // 2}", {"pipeline": 2 * p, "data": d // 2}),
        (f"P{p // 2} D{2 * d}", {"pipeline": p // 2, "data": 2 * d}),
        ("no interleaving", {"chunks": 1}),
        (f"microbatch {2 * b}", {"micro_batch_size": 2 * b}),
        (f"microbatch {b // 2}", {"micro_batch_size": b // 2}),
        ("nothing recomputed", {"recompute": "none"}),
        ("full recomputation", {"recompute": "full"}),
        ("no sequence parallelism", {"sequence_parallel": False}),
        ("sequence parallelism", {"sequence_parallel": True}),
        ("no distributed optimizer", {"distributed_optimizer": False}),
        ("distributed optimizer", {"distributed_optimizer": True}),
    ]
    for words, change in changes:
        other = _adjusted(dataclasses.replace(layout, **change), job)
        if other != layout and _divides(other, job, cluster):
            yield words, other


def _adjusted(layout: Layout, job: Job) -> Layout:
    """With as many chunks at most as the new stages' layers and microbatches admit, and what no process shares left
    out."""
    p = layout.pipeline
    chunks = 1
    if p > 1 and layout.data and layout.micro_batch_size and layout.microbatches(job) % p == 0:
        fitting = [v for v in divisors(job.model.num_layers // p) if v <= min(layout.chunks, MOST_CHUNKS)]
        chunks = max(fitting, default=1)
    return dataclasses.replace(
        layout,
        chunks=chunks,
        sequence_parallel=layout.sequence_parallel and divides_sequence(layout.tensor, job),
        distributed_optimizer=layout.distributed_optimizer and layout.data > 1,
        overlap_grad_reduce=layout.data > 1,
    )


def _divides(layout: Layout, job: Job, cluster: Cluster) -> bool:
    if min(layout.tensor, layout.pipeline, layout.data) < 1:
        return False
    return (
        layout.processes == cluster.devices
        and layout.micro_batch_size in MICRO_BATCH_SIZES
        and job.model.num_layers % layout.pipeline == 0
        and divides(layout.tensor, job.model)
        and job.global_batch_size % (layout.data * layout.micro_batch_size) == 0
    )


def why_not(other: Layout, best: Plan, job: Job, cluster: Cluster) -> str:
    """What a layout would cost beside the best, and by what."""
    memory = most_memory(job, other, cluster, OURS)
    if not fits(memory, cluster):
        room = USABLE * cluster.device.memory
        return f"does not fit: needs {memory.total / 1e9:.0f} GB of {room / 1e9:.0f}"
    return slower_by(make_plan(job, other, cluster), best)


def slower_by(plan: Plan, best: Plan) -> str:
    """How much longer a plan's step takes than the best's, and on what."""
    slower = plan.step.seconds / best.step.seconds - 1
    if slower < AS_FAST:
        return f"as fast, and needs {plan.memory.total / 1e9:.0f} GB"
    more = {name: getattr(plan.step, name) - getattr(best.step, name) for name in PARTS}
    again = plan.step.recompute - best.step.recompute
    worst = max(more, key=more.get)
    reason = "recomputation" if again > 0.5 * more[worst] else PARTS[worst]
    return f"{slower:.1%} slower, by {reason}"


def takeaways(best: Plan, job: Job, cluster: Cluster) -> list[str]:
    """The advice of 2104.04473 section 3, with this case's numbers; each a paragraph."""
    layout, step = best.layout, best.step
    t, p, d = layout.tensor, layout.pipeline, layout.data
    m = layout.microbatches(job)
    share = {name: getattr(step, name) / step.seconds for name in (*PARTS, "recompute")}
    limit = USABLE * cluster.device.memory / 1e9
    paragraphs = [
        f"Tensor parallelism up to a node, pipelines beyond (takeaway 1). A node holds {cluster.per_node} devices; "
        f"here T{t} {'stays within it' if t <= cluster.per_node else 'goes beyond it'}, and its communication is "
        f"{share['tensor']:.1%} of the step"
        + (f"; P{p} stages share the layers." if p > 1 else "; no pipeline is needed."),
        f"Model parallelism until the model fits, replicas beyond (takeaway 2). {t * p} devices hold the model, "
        f"{best.memory.total / 1e9:.0f} GB each of {limit:.0f} that can be had; {d} replicas share the batch, and what "
        f"they exchange is {share['gradients']:.1%} of the step.",
    ]
    if p > 1:
        plain = bubble_fraction(p, 1, m)
        paragraphs.append(
            f"The bubble (section 2.2): {p} stages and {m} microbatches make (p - 1) / m = {plain:.1%} of the work"
            + (
                f", which {layout.chunks} chunks a stage divide to {bubble_fraction(p, layout.chunks, m):.1%}, for "
                f"{layout.chunks} times the transfers"
                if layout.chunks > 1
                else ""
            )
            + f"; by the clock a stage stands idle {share['bubble']:.1%} of the step."
        )
    paragraphs.append(
        f"The microbatch is a matter of the case (takeaway 3): larger ones make better matrix products, and fewer of "
        f"them a larger bubble. Here {layout.micro_batch_size} is best, which leaves {m} to a replica."
    )
    paragraphs.append(
        f"Recomputation (section 3.5): {share['recompute']:.1%} of the step is computed again, as the activations "
        "would not fit otherwise or a smaller microbatch would cost more."
        if layout.recompute != "none"
        else "Recomputation (section 3.5): nothing need be computed again; the activations fit."
    )
    return paragraphs
