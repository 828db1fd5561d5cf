"""Costs of a core, which computes, reads memory and communicates in turn."""

from __future__ import annotations

import dataclasses

import pytest
from planner.test_calibrate import cores

from megatron.planner.calibrate_model import make_job
from megatron.planner.kernels import Kernels
from megatron.planner.layout import Layout
from megatron.planner.programs import OURS

JOB = make_job(2, 512, 8, 256)


@pytest.mark.parametrize(
    ("compute", "expected"),
    [
        (0.0, 3.0),
        (0.5, 2.5),  # while the message is under way
        (5.0, 2.0),  # all but this second of latency
    ],
)
def test_communication_is_hidden_while_it_waits(compute: float, expected: float) -> None:
    assert cores().exposed(3.0, 1.0, compute) == expected


def test_a_product_takes_the_time_of_its_operands_too() -> None:
    machine = cores()
    efficiency, device = machine.efficiency, machine.device
    m, n, k = 128, 2048, 512
    moved = 4 * (m * k + k * n + m * n) / (device.bandwidth * efficiency.stream)
    expected = 2 * m * n * k / (device.peak * efficiency.matmul) + moved + efficiency.launch
    assert Kernels(JOB, Layout(), machine, OURS).matmul(m, n, k) == pytest.approx(expected)


def test_products_hide_the_latency_of_tensor_parallelism_in_backward() -> None:
    """Both products of a column-parallel layer hide a collective; a split backward pass has one of them later."""
    machine, group = cores(), cores().group(2, 1)
    whole = Layout(tensor=2, sequence_parallel=True)
    split = dataclasses.replace(whole, pipeline=2, pipeline_schedule="zb-h1")
    found = []
    for layout in (whole, split):
        kernels = Kernels(JOB, layout, machine, OURS)
        exposed = kernels.column_parallel(kernels.layer_linear(256, 512, 1024)).backward.total
        size = 256 * 512 * 4
        found.append(machine.all_gather(size, group) + machine.reduce_scatter(size, group) - exposed)
    gather, scatter = machine.all_gather(0, group), machine.reduce_scatter(0, group)
    assert found == pytest.approx([gather + scatter, gather])
