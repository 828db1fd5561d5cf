"""Questions around a plan."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any

import pytest
from published import cluster, job

from megatron.commands.plan_inputs import PlanConfig, make_job
from megatron.errors import InputError
from megatron.parallel.schedules import Compute
from megatron.planner import division
from megatron.planner.layout import Layout
from megatron.planner.memory import fits, max_memory
from megatron.planner.our_program import uncompiled
from megatron.planner.programs import OURS
from megatron.planner.questions import (
    LENGTH_STEP,
    cluster_sizes,
    fewest_gpus,
    largest_micro_batch,
    longest_of_all,
    longest_sequence,
    other_clusters,
    with_length,
)
from megatron.planner.search import make_plan, search
from megatron.variants.auto_schedule import best_schedule

GPT = job(24, 2048, 16, 64)


@pytest.mark.parametrize(
    "layout",
    [Layout(data=8), Layout(tensor=2, pipeline=2, data=2, recompute="full"), Layout(tensor=2, context=4)],
)
def test_the_limits_of_a_layout_are_the_last_that_fit(layout: Layout) -> None:
    machine = cluster(8)
    length, size = longest_sequence(GPT, layout, machine), largest_micro_batch(GPT, layout, machine)
    assert length % (2 * layout.context) == 0 and length % LENGTH_STEP == 0

    def fits_with(length: int, size: int) -> bool:
        other = dataclasses.replace(layout, micro_batch_size=size)
        batch = layout.data * size * layout.microbatches(GPT)
        longer = dataclasses.replace(with_length(GPT, length), global_batch_size=batch)
        return fits(max_memory(longer, other, machine, OURS), machine)

    assert fits_with(length, 1) and not fits_with(length + LENGTH_STEP, 1)
    assert fits_with(2048, size) and not fits_with(2048, size + 1)


def test_limits_of_automatic_schedules_need_few_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Microbatches of all sizes have one list of passes. Each length has its own, and few lengths are tried."""
    made: list[tuple[int, int, int]] = []

    def counted(*shape: int, **options: Any) -> list[list[Compute]]:
        made.append(shape)
        return best_schedule(*shape, **options)

    monkeypatch.setattr(division, "best_schedule", counted)
    gpt, machine = job(12, 1152, 9, 8), cluster(4)
    layout = Layout(pipeline=4, pipeline_schedule="auto")
    assert largest_micro_batch(gpt, layout, machine) > 1 and len(made) == 1
    length = longest_sequence(gpt, layout, machine)
    assert len(made) <= 6
    for longer, does_fit in ((0, True), (LENGTH_STEP, False)):
        memory = max_memory(with_length(gpt, length + longer), layout, machine, uncompiled(gpt.model))
        assert fits(memory, machine) == does_fit


def test_what_does_not_fit_has_no_limits() -> None:
    large = job(96, 12288, 96, 64)
    assert (
        longest_sequence(large, Layout(), cluster(1)) == largest_micro_batch(large, Layout(), cluster(1)) == 0
    )
    assert longest_of_all(large, cluster(1)) == (0, None)


def test_the_longest_sample_of_a_cluster_divides_it() -> None:
    """No layout of 8 GPUs holds longer ones than tensor and context parallelism together with recomputation."""
    length, layout = longest_of_all(GPT, cluster(8))
    assert layout is not None and layout.processes == 8 and layout.recompute == "full"
    assert (
        longest_sequence(GPT, layout, cluster(8))
        == length
        > 8 * longest_sequence(GPT, Layout(data=8), cluster(8))
    )


def test_faster_clusters_are_not_slower() -> None:
    large, machine = job(48, 6144, 48, 64), cluster(32)
    plan = search(large, machine, num_plans=1, progress=lambda count: None).plans[0]
    others = dict(other_clusters(machine))
    assert len(others) == 5 and "network twice as fast" not in dict(other_clusters(cluster(8)))
    for other in others.values():
        assert make_plan(large, plan.layout, other).step.seconds <= plan.step.seconds
    faster = make_plan(large, plan.layout, others["matrix products twice as fast"]).step
    assert faster.matmul == pytest.approx(plan.step.matmul / 2, rel=0.02)


def test_fewer_gpus_than_the_fewest_miss_the_deadline() -> None:
    seconds, tokens = 20 * 86400, 100e9
    machine, plan = fewest_gpus(GPT, tokens, seconds, cluster)
    steps = tokens / (2048 * 64)
    assert plan.step.seconds * steps <= seconds
    for size in cluster_sizes(GPT):
        if size < machine.devices and (size % 8 == 0 or size < 8):
            slower = search(GPT, cluster(size), num_plans=1, progress=lambda count: None).plans[0]
            assert slower.step.seconds * steps > seconds


@pytest.mark.parametrize(
    ("model", "gpu", "fp8_format", "largest"),
    [
        ("llama3-8b", "h100", "hybrid", 32),
        pytest.param("llama3-8b", "h100", "hybrid", 140, marks=pytest.mark.slow),
        pytest.param("llama3-8b", "h100", None, 140, marks=pytest.mark.slow),
        pytest.param("llama2-7b", "a100", None, 140, marks=pytest.mark.slow),
    ],
)
def test_the_fewest_gpus_are_those_of_searches_of_all_sizes(
    model: str, gpu: str, fp8_format: str | None, largest: int
) -> None:
    """The deadlines are the times of the sizes themselves; one step is trained."""
    task = make_job(PlanConfig(model=model, fp8_format=fp8_format), {})
    steps = {}
    for size in (size for size in cluster_sizes(task) if size <= largest):
        with contextlib.suppress(InputError):  # not whole nodes, or too small for the model
            plan = search(task, cluster(size, gpu), num_plans=1, progress=lambda count: None).plans[0]
            steps[size] = plan.step.seconds
    for seconds in steps.values():
        fewest = min(size for size, step in steps.items() if step <= seconds)
        tokens = task.global_batch_size * task.seq_length
        machine, plan = fewest_gpus(task, tokens, seconds, functools.partial(cluster, gpu=gpu))
        assert (machine.devices, plan.step.seconds) == (fewest, steps[fewest])


@pytest.mark.slow
def test_the_fewest_gpus_for_long_samples() -> None:
    """Causal attention is most of the work: half of the square that model FLOPs count."""
    task = make_job(PlanConfig(model="llama3-8b", seq_length=131072, global_batch_size=32), {})
    machine, _ = fewest_gpus(task, 1e12, 30 * 86400, functools.partial(cluster, gpu="h100"))
    limit = 30 * 86400 / (1e12 / (32 * 131072))
    for size in (size for size in cluster_sizes(task) if size < machine.devices):
        with contextlib.suppress(InputError):
            plan = search(task, cluster(size, "h100"), num_plans=1, progress=lambda count: None).plans[0]
            assert plan.step.seconds > limit


def test_a_deadline_that_no_cluster_meets_is_an_error() -> None:
    with pytest.raises(InputError, match=r"--days: no number of GPUs .*choose more days, or a larger"):
        fewest_gpus(job(2, 256, 4, 2), 1e15, 86400, cluster)
