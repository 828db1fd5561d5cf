"""Layouts written as letters and sizes, such as T8P8D4V12b1."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

from megatron.errors import InputError
from megatron.planner.cluster import Cluster
from megatron.planner.layout import Job, Layout
from megatron.planner.memory import fits, usable_memory
from megatron.planner.our_program import memory_of
from megatron.planner.space import (
    can_route,
    can_tensor_parallel,
    divides_experts,
    offloaded,
    schedules,
    variants,
)

# Letters of the axes, chunks per stage and microbatch size, with the fields of `Layout`. Case does not matter.
LETTERS = {
    "t": "tensor",
    "c": "context",
    "p": "pipeline",
    "d": "data",
    "e": "expert",
    "v": "chunks",
    "b": "micro_batch_size",
}


def parse_sizes(text: str) -> dict[str, Any]:
    """Sizes by field of `Layout`.

    Raises:
        InputError: the text is no layout.
    """
    found = re.findall(r"([a-z])(\d{1,6})", text.lower())
    sizes = {LETTERS[letter]: int(size) for letter, size in found if letter in LETTERS}
    whole = "".join(f"{letter}{size}" for letter, size in found)
    if whole != text.lower().replace(" ", "") or len(sizes) < len(found) or not sizes or 0 in sizes.values():
        raise InputError(
            f"--layout: {text} is not a layout such as T8P8D4V12b1: tensor-, context- (C), pipeline-, data- and "
            "expert-parallel (E) sizes, chunks of a stage and microbatch size, each at most once"
        )
    return sizes


def given_devices(text: str) -> int | None:
    """Number of GPUs of a layout; None if it leaves out the data-parallel size."""
    sizes = parse_sizes(text)
    return Layout(**sizes).processes if "data" in sizes else None


def parse_shape(text: str, job: Job, cluster: Cluster) -> Layout:
    """A layout of these sizes. Without D it has as many replicas as the cluster has room for.

    Raises:
        InputError: it divides the cluster or the job not evenly, or no way to save memory makes it fit.
    """
    sizes = parse_sizes(text)
    sizes.setdefault("data", max(cluster.devices // Layout(**sizes).processes, 1))
    shape = dataclasses.replace(
        Layout(**sizes), overlap_grad_reduce=sizes["data"] * sizes.get("context", 1) > 1
    )
    if why := next(_faults(shape, job, cluster), None):
        raise InputError(f"--layout: {text}: {why}")
    if not schedules(job, shape):
        raise InputError(
            f"--layout: {text}: {job.model.num_layers} layers in {shape.microbatches(job)} microbatches do not divide "
            f"into P{shape.pipeline} x V{shape.chunks}"
        )
    ways = (way for layout in variants(shape, job, cluster) for way in offloaded(layout))
    memories = [memory_of(job, way, cluster) for way in ways]
    if not any(fits(memory, cluster) for memory in memories):
        least = min(memories, key=lambda memory: memory.total)
        raise InputError(
            f"--layout: {text} does not fit: it needs {least.total / 1e9:.1f} GB of the "
            f"{usable_memory(cluster) / 1e9:.1f} that are usable, with all that saves memory"
        )
    return shape


def _faults(shape: Layout, job: Job, cluster: Cluster) -> Iterator[str]:
    """Reasons why a shape does not divide the cluster or the job."""
    faults = (
        (
            shape.processes != cluster.devices,
            f"takes {shape.processes} GPUs, and the cluster has {cluster.devices} (--gpus)",
        ),
        (
            not can_tensor_parallel(job, shape.tensor),
            f"T{shape.tensor} does not divide the heads, the MLP or the experts of the model"
            + ("" if job.fp8_format is None else " into sizes that FP8 products take"),
        ),
        (
            shape.context > 1 and job.seq_length % (2 * shape.context) > 0,
            f"--seq-length {job.seq_length} is not a multiple of 2 x {shape.context}",
        ),
        (
            not can_route(job, shape),
            f"--seq-length {job.seq_length}"
            + (f" over C{shape.context}" if shape.context > 1 else "")
            + f" is not a multiple of T{shape.tensor}, whose ranks route equal numbers of tokens to experts",
        ),
        (
            job.global_batch_size % (shape.data * shape.micro_batch_size) > 0,
            f"D{shape.data} x b{shape.micro_batch_size} does not divide --global-batch-size {job.global_batch_size}",
        ),
        (not divides_experts(shape, job), f"E{shape.expert} does not divide the experts, or the ranks"),
        (shape.chunks > 1 and shape.pipeline == 1, f"V{shape.chunks} needs P above 1"),
    )
    return (why for is_so, why in faults if is_so)
