"""Cluster constants fitted to measured times."""

from __future__ import annotations

import pytest

from megatron.planner.calibrate import COPIED, HIDDEN, JOBS, MESSAGES, SIDE, TOKENS, fit_cluster
from megatron.planner.cluster import Cluster, Device, Efficiency, Link
from megatron.planner.layout import Layout
from megatron.planner.memory import stage_parameters
from megatron.planner.programs import OURS
from megatron.planner.simulate import Simulator


def measured(machine: Cluster) -> dict[str, float]:
    """Return the times that a calibration would measure on a machine that matches the planner's model exactly.

    Elements moved per element: 2 forward and 3 backward by a normalization, 3 by an addition, 2 and 3 by GELU on four
    times as many elements. Adam reads the gradient twice and master weight and two moments once, and writes these
    three.
    """
    device, efficiency = machine.device, machine.efficiency
    found = {name: Simulator(job, Layout(), machine, OURS).busiest[1] for name, job in JOBS.items()}
    found["copy"] = 8 * COPIED / device.bandwidth
    found["square"] = 2 * SIDE**3 / device.peak
    found["elementwise"] = 4 * (8 + 4 * 5) * TOKENS * HIDDEN / (device.bandwidth * efficiency.memory)
    moved = 4 * 8 * stage_parameters(JOBS["matmul"], Layout(), 0)
    found["optimizer"] = moved / (device.bandwidth * efficiency.stream)
    found["before"] = 1e-3
    everyone = machine.group(machine.devices, 1)
    return found | {f"reduce {size}": 1e-3 + machine.all_reduce(size, everyone) for size in MESSAGES}


@pytest.mark.parametrize(
    ("processes", "efficiency"),
    [
        (
            2,
            Efficiency(
                matmul=0.95, memory=0.3, stream=0.4, link=1.0, attention=0.5, network=1.0, launch=1e-4
            ),
        ),
        (
            4,
            Efficiency(
                matmul=0.6, memory=0.9, stream=0.8, link=1.0, attention=0.02, network=1.0, launch=5e-6
            ),
        ),
    ],
)
def test_the_fit_recovers_the_constants_of_a_machine(processes: int, efficiency: Efficiency):
    link = Link(2e9, 3e-5)
    device = Device("cpu", "fp32", peak=1e11, sms=1, memory=8e9, bandwidth=2e10)
    found = fit_cluster(measured(Cluster(device, processes, processes, link, link, efficiency)), processes)
    assert vars(found.efficiency) == pytest.approx(vars(efficiency), rel=1e-6)
    assert vars(found.link) == pytest.approx(vars(link), rel=1e-6)
    assert (found.device.peak, found.device.bandwidth) == pytest.approx((1e11, 2e10))
    assert (found.devices, found.nodes) == (processes, 1)
