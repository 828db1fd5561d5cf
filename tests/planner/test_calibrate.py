"""Constants from measured seconds."""

from __future__ import annotations

import pytest

from megatron.planner.calibrate import COPIED, HIDDEN, JOBS, MESSAGES, SIDE, TOKENS, cluster_of
from megatron.planner.cluster import Cluster, Device, Link, Reached
from megatron.planner.layout import OURS, Layout
from megatron.planner.memory import stage_parameters
from megatron.planner.simulate import Simulator


def measured(machine: Cluster) -> dict[str, float]:
    """What a calibration would find on a machine of which the planner is right about everything.

    Per element a normalisation moves 2 and 3, an addition 3, GELU of four times as many 2 and 3 each; Adam reads the
    gradient twice and master weight and two moments once, and writes these three.
    """
    device, reached = machine.device, machine.reached
    found = {name: Simulator(job, Layout(), machine, OURS).busiest[1] for name, job in JOBS.items()}
    found["copy"] = 8 * COPIED / device.bandwidth
    found["square"] = 2 * SIDE**3 / device.peak
    found["elements"] = 4 * (8 + 4 * 5) * TOKENS * HIDDEN / (device.bandwidth * reached.memory)
    moved = 4 * 8 * stage_parameters(JOBS["product"], Layout(), 0)
    found["optimizer"] = moved / (device.bandwidth * reached.stream)
    found["before"] = 1e-3
    everyone = machine.group(machine.devices, 1)
    return found | {f"reduce {size}": 1e-3 + machine.all_reduce(size, everyone) for size in MESSAGES}


@pytest.mark.parametrize(
    ("processes", "reached"),
    [
        (2, Reached(product=0.95, memory=0.3, stream=0.4, link=1.0, attention=0.5, launch=1e-4)),
        (4, Reached(product=0.6, memory=0.9, stream=0.8, link=1.0, attention=0.02, launch=5e-6)),
    ],
)
def test_the_constants_of_a_machine_are_found(processes: int, reached: Reached):
    link = Link(2e9, 3e-5)
    device = Device("cpu", "fp32", peak=1e11, sms=1, memory=8e9, bandwidth=2e10)
    found = cluster_of(measured(Cluster(device, processes, processes, link, link, reached)), processes)
    assert vars(found.reached) == pytest.approx(vars(reached), rel=1e-6)
    assert vars(found.link) == pytest.approx(vars(link), rel=1e-6)
    assert (found.device.peak, found.device.bandwidth) == pytest.approx((1e11, 2e10))
    assert (found.devices, found.nodes) == (processes, 1)
