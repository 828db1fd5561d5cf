"""The layouts that a search chooses from: sizes that divide a job and a cluster, schedules, and ways to save memory."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from megatron.model.config import ModelConfig
from megatron.model.flops import layer_flops, vocabulary_flops
from megatron.performance.config import FP8_MULTIPLE, GROUPED_MULTIPLE, fp8_sizes
from megatron.planner.cluster import Cluster
from megatron.planner.layout import Job, Layout

# Larger numbers of chunks per stage, and other microbatch sizes, gain nothing.
MAX_CHUNKS, MICRO_BATCH_SIZES = 8, (1, 2, 4, 8, 16, 32)
# Stages up to which V-shaped schedules, and stages of equal work, are tried.
MAX_V_STAGES, MAX_EQUAL_STAGES = 16, 32
# Experts are shared by more ranks only within a node.
EXPERT_TENSOR_SIZES = (1, 2, 4, 8)
# Longer parts of a sequence need no division: context parallelism is for long sequences.
MIN_CONTEXT_TOKENS = 2048


def tensor_sizes(job: Job, cluster: Cluster) -> list[int]:
    """Tensor-parallel sizes that divide model and cluster, up to two nodes or an NVLink domain.

    A size beyond one node is included to show its cost: the links between nodes are too slow for communication in every
    layer (2104.04473 section 5.4.1).
    """
    most = min(cluster.nvlink_domain or 2 * cluster.per_node, cluster.devices)
    sizes = [t for t in range(1, most + 1) if cluster.devices % t == 0 and can_tensor_parallel(job, t)]
    return [t for t in sizes if can_route(job, Layout(tensor=t))]


def can_tensor_parallel(job: Job, tensor: int) -> bool:
    """Return True if so many ranks can share every layer."""
    model, shared = job.model, job.model.moe_shared_expert_intermediate_size or 0
    if not (model.can_split(tensor) and shared % tensor == 0):
        return False
    in_fp8 = job.fp8_format is not None and model.num_experts is None
    return not in_fp8 or all(size % FP8_MULTIPLE == 0 for size in fp8_sizes(model, tensor).values())


def can_route(job: Job, layout: Layout) -> bool:
    """Return True if tensor-parallel ranks can route equal parts of a rank's tokens to experts."""
    return job.model.num_experts is None or job.seq_length // layout.context % layout.tensor == 0


def expert_sizes(job: Job, ranks: int) -> list[tuple[int, int]]:
    """Expert-parallel and expert-tensor-parallel sizes that divide the experts and the `ranks` of a stage."""
    model = job.model
    if model.num_experts is None or model.moe_ffn_hidden_size is None:
        return [(1, 1)]
    sizes = [e for e in range(1, model.num_experts + 1) if model.num_experts % e == 0]
    parts = [t for t in EXPERT_TENSOR_SIZES if can_share_experts(model, t)]
    return [(e, t) for e in sizes for t in parts if ranks % (e * t) == 0]


def can_share_experts(model: ModelConfig, ranks: int) -> bool:
    """Return True if so many ranks can share each expert."""
    multiple = ranks * (GROUPED_MULTIPLE if model.moe_grouped_gemm else 1)
    biases = model.add_expert_bias * model.hidden_size
    return ranks == 1 or ((model.moe_ffn_hidden_size or 0) % multiple == 0 and biases % ranks == 0)


def divides_experts(layout: Layout, job: Job) -> bool:
    """Return True if the ranks of a stage can divide its experts so."""
    sizes = expert_sizes(job, layout.replicas * layout.tensor)
    return (layout.expert, layout.expert_tensor) in sizes


def pipeline_sizes(job: Job) -> list[int]:
    """Numbers of stages that can divide the layers."""
    most = max(job.model.num_layers, min(job.model.num_layers + 2, MAX_EQUAL_STAGES))
    return [p for p in range(1, most + 1) if divides_layers(job, Layout(pipeline=p))]


def divides_layers(job: Job, shape: Layout) -> bool:
    """Return True if stages can have equal numbers of layers or, with one chunk each, equal work."""
    return shape.splits_layers(job) or can_balance(job, shape)


def can_balance(job: Job, shape: Layout) -> bool:
    """Return True if stages of equal work are tried: only the first and the last may then have no layer."""
    p = shape.pipeline
    return shape.chunks == 1 and 1 < p <= min(MAX_EQUAL_STAGES, job.model.num_layers + 2)


def can_sequence_parallel(job: Job, layout: Layout) -> bool:
    """Return True if sequence parallelism is possible over the tensor-parallel ranks of a layout."""
    chunks = 2 * layout.context if layout.context > 1 else 1  # of a sequence
    return layout.tensor > 1 and job.seq_length % (layout.tensor * chunks) == 0


def can_shard_parameters(layout: Layout) -> bool:
    """Return True if replicas may shard gradients and parameters.

    Schedules that split backward passes compute a layer's gradients in several passes.
    """
    return not layout.splits_backward


def can_post_validate(job: Job, layout: Layout) -> bool:
    """Return True if stages may update their weights before the norm of all gradients is known.

    That is where no stage waits for the gradient of another one's table.
    """
    tied = not job.model.untie_embeddings_and_output_weights or job.model.mtp_num_layers > 0
    return layout.splits_backward and (layout.v_shaped or not tied)


def gains_by_validation(job: Job, layout: Layout) -> bool:
    """Return True if post-validation may shorten a step: if no stage waits between its first and its last pass."""
    gains = layout.schedule_name in ("zb-h2", "zb-v") and layout.pipeline <= MAX_V_STAGES
    return gains and can_post_validate(job, layout)


def can_offload_activations(layout: Layout) -> bool:
    """Return True if activations may go to host memory.

    Recomputed layers keep only their inputs, and post-validation repeats forward passes.
    """
    return layout.recompute != "full" and not layout.post_validation


def can_offload_optimizer(layout: Layout) -> bool:
    """Return True if the optimizer's state may go to host memory: post-validation has its copy on the device."""
    return not layout.post_validation


def offloaded(layout: Layout) -> Iterator[Layout]:
    """Yield a layout that uses no host memory, and that layout with all that may go there."""
    for state in (False, True)[: 1 + can_offload_optimizer(layout)]:
        for layers in (0, None)[: 1 + can_offload_activations(layout)]:
            yield dataclasses.replace(layout, offload_optimizer=state, offload_layers=layers)


def frugal(job: Job, axes: Layout) -> Iterator[Layout]:
    """Yield a layout of these axis sizes with every way to save memory, with and without recomputation and offload."""
    shards = axes.replicas > 1
    layout = dataclasses.replace(
        axes,
        balanced=not axes.splits_layers(job),
        distributed_optimizer=shards,
        sharded_parameters=shards,
        sequence_parallel=can_sequence_parallel(job, axes),
    )
    for recompute in ("full", "none"):
        yield from offloaded(dataclasses.replace(layout, recompute=recompute))


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
            if not can_route(job, Layout(tensor=t, context=context)):
                continue
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
    if shape.chunks == 1:
        return [None, "zb-h1", "zb-h2"] if divides_layers(job, shape) else []
    if shape.splits_layers(job) and m % p == 0:
        names.append(None)
    if shape.chunks == 2 and p <= MAX_V_STAGES and job.model.num_layers % (2 * p) == 0:
        names += ["zb-v", "v-half", "v-min", *["dualpipe-v"] * (m >= 2 * p)]
    return names


def gains_by_division(job: Job, shape: Layout) -> bool:
    """Return True if stages of equal work may be faster: if the layers do not divide, or the output layer is large."""
    if not can_balance(job, shape):
        return False
    model = job.model
    head = vocabulary_flops(model, job.padded_vocab_size(shape.tensor), job.seq_length)
    layer = layer_flops(model, job.seq_length, has_experts=model.num_experts is not None)
    return model.num_layers % shape.pipeline > 0 or model.mtp_num_layers > 0 or head > layer / 2


def shardings(job: Job, shape: Layout, cluster: Cluster) -> list[dict[str, Any]]:
    """Fields of the ways to shard over the replicas: each less memory, and more communication, than the one before.

    Parameters are also sharded within an NVLink domain only (hybrid sharding), without experts, whose replicas are
    others.
    """
    if shape.replicas == 1:
        return [{}]
    optimizer = {"distributed_optimizer": True}
    found: list[dict[str, Any]] = [{}, optimizer]
    if can_shard_parameters(shape):
        found.append(optimizer | {"sharded_gradients": True})
        within = shape.data_group(cluster).per_domain
        dense = job.model.num_experts is None
        if dense and 1 < within < shape.replicas and shape.replicas % within == 0:
            instances = shape.replicas // within
            found.append(optimizer | {"sharded_parameters": True, "instances": instances})
        found.append(optimizer | {"sharded_parameters": True})
    return found


def variants(
    shape: Layout, job: Job, cluster: Cluster, recomputes: tuple[str, ...] = ("none", "full")
) -> Iterator[Layout]:
    """Yield a shape with each schedule, with and without stages of equal work and each way to save memory.

    Selective recomputation is left out: fused attention has no scores for it to save.
    """
    parallel = (False, True) if can_sequence_parallel(job, shape) else (False,)
    for scheduled in with_schedules(shape, job):
        ways = shardings(job, scheduled, cluster)
        for recompute, sequence_parallel, sharded in itertools.product(recomputes, parallel, ways):
            yield dataclasses.replace(
                scheduled, recompute=recompute, sequence_parallel=sequence_parallel, **sharded
            )


def with_schedules(shape: Layout, job: Job) -> Iterator[Layout]:
    """Yield a shape with each schedule, with and without stages of equal work and post-validation."""
    divisions = [False] * shape.splits_layers(job) + [True] * gains_by_division(job, shape)
    for name, balanced in itertools.product(schedules(job, shape), divisions):
        scheduled = dataclasses.replace(shape, pipeline_schedule=name, balanced=balanced)
        if scheduled.splits_backward:  # weight gradients are complete only at the end of a step
            scheduled = dataclasses.replace(scheduled, overlap_grad_reduce=False)
        yield scheduled
        if gains_by_validation(job, scheduled):
            yield dataclasses.replace(scheduled, post_validation=True)


def count_variants(shape: Layout, job: Job, cluster: Cluster) -> int:
    """Number of `variants`."""
    ways = sum(len(shardings(job, scheduled, cluster)) for scheduled in with_schedules(shape, job))
    return 2 * (1 + can_sequence_parallel(job, shape)) * ways
