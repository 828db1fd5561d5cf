"""Constants from measured seconds."""

from __future__ import annotations

import pytest

from megatron.planner.calibrate import COPIED, HIDDEN, JOBS, MESSAGES, SIDE, TOKENS, fit_cluster
from megatron.planner.cluster import Cluster, Device, Efficiency, Link
from megatron.planner.layout import OURS, Layout
from megatron.planner.memory import stage_parameters
from megatron.planner.simulate import Simulator


def measured(machine: Cluster) -> dict[str, float]:
    """What a calibration would find on a machine of which the planner is right about everything.

    Per element a normalisation moves 2 and 3, an addition 3, GELU of four times as many 2 and 3 each; Adam reads the
    gradient twice and master weight and two moments once, and writes these three.
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
        (2, Efficiency(matmul=0.95, memory=0.3, stream=0.4, link=1.0, attention=0.5, launch=1e-4)),
        (4, Efficiency(matmul=0.6, memory=0.9, stream=0.8, link=1.0, attention=0.02, launch=5e-6)),
    ],
)
def test_the_constants_of_a_machine_are_found(processes: int, efficiency: Efficiency):
    link = Link(2e9, 3e-5)
    device = Device("cpu", "fp32", peak=1e11, sms=1, memory=8e9, bandwidth=2e10)
    found = fit_cluster(measured(Cluster(device, processes, processes, link, link, efficiency)), processes)
    assert vars(found.efficiency) == pytest.approx(vars(efficiency), rel=1e-6)
    assert vars(found.link) == pytest.approx(vars(link), rel=1e-6)
    assert (found.device.peak, found.device.bandwidth) == pytest.approx((1e11, 2e10))
    assert (found.devices, found.nodes) == (processes, 1)
