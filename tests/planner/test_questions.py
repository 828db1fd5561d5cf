"""Questions around a plan."""

from __future__ import annotations

import dataclasses

import pytest
from published import cluster, job

from megatron.errors import InputError
from megatron.planner.layout import Layout
from megatron.planner.memory import fits, max_memory
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


def test_a_deadline_that_no_cluster_meets_is_an_error() -> None:
    with pytest.raises(InputError, match=r"--days: no number of GPUs .*choose more days, or a larger"):
        fewest_gpus(job(2, 256, 4, 2), 1e15, 86400, cluster)
