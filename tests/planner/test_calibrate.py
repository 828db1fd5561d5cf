"""Cluster constants fitted to measured times."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron.planner import calibrate as calibrate_module
from megatron.planner.calibrate import (
    COLLECTIVES,
    COPIED,
    HIDDEN,
    MESSAGES,
    SIDE,
    TOKENS,
    fit_cluster,
    job_seconds,
)
from megatron.planner.calibrate_attention import ring_seconds
from megatron.planner.calibrate_model import JOBS, OPTIMIZED
from megatron.planner.cluster import Cluster, Device, Efficiency, Link, Measured
from megatron.planner.layout import Layout
from megatron.planner.parameters import stage_parameters

ROOT = Path(__file__).resolve().parent.parent.parent


LINK = Link(2e9, 3e-5)
CORE = Efficiency(
    matmul=0.9, memory=0.5, stream=0.5, link=1.0, attention=0.5, network=1.0, launch=1e-5, beside=1.0
)


# All-gathers and reduce-scatters take about as long as all-reduces.
OF_GLOO = Measured(
    all_gather=Link(1.2e9, 5e-5),
    reduce_scatter=Link(1.0e9, 7e-5),
    all_to_all=Link(1.4e9, 4e-5),
    send=Link(3.0e9, 2e-5),
    shift=Link(1.8e9, 6e-5),
)


def cores(number: int = 2, precision: str = "fp32", efficiency: Efficiency = CORE) -> Cluster:
    """So many cores of a machine."""
    device = Device("cpu", precision, peak=1e11, sms=1, memory=8e9, bandwidth=2e10)
    return Cluster(device, number, number, LINK, LINK, efficiency)


def measured(machine: Cluster) -> dict[str, float]:
    """Return the times that a calibration would measure on a machine that matches the planner's model exactly.

    Elements moved per element: 2 forward and 3 backward by a normalization, 3 by an addition, 2 and 3 by GELU on four
    times as many elements. Adam reads the gradient twice and master weight and two moments once, and writes these
    three and in bf16 the parameter.
    """
    device, efficiency = machine.device, machine.efficiency
    found = {
        f"{name} {i}": job_seconds(name, job, machine)
        for name, jobs in JOBS.items()
        for i, job in enumerate(jobs)
    }
    found["copy"] = 8 * COPIED / device.bandwidth
    found["square"] = 2 * SIDE**3 / device.peak
    found["elementwise"] = (
        device.element * (8 + 4 * 5) * TOKENS * HIDDEN / (device.bandwidth * efficiency.memory)
    )
    bytes_ = 4 * 8 + (2 if device.precision == "bf16" else 0)
    moved = bytes_ * stage_parameters(OPTIMIZED, Layout(), 0)
    found["optimizer"] = moved / (device.bandwidth * efficiency.stream)
    for name, size in itertools.product(COLLECTIVES, MESSAGES):
        group = machine.group(2 if name == "send" else machine.devices, 1)
        found[f"{name} {size}"] = getattr(machine, name)(size, group)
    found["ring"] = ring_seconds(machine)
    return found


@pytest.mark.parametrize(
    ("processes", "precision", "efficiency"),
    [
        (
            2,
            "fp32",
            Efficiency(
                matmul=0.95, memory=0.3, stream=0.4, link=1.0, attention=0.5, network=1.0, launch=1e-4
            ),
        ),
        (
            4,
            "bf16",
            Efficiency(
                matmul=0.6, memory=0.9, stream=0.8, link=1.0, attention=0.02, network=1.0, launch=5e-6
            ),
        ),
    ],
)
def test_the_fit_recovers_the_constants_of_a_machine(
    processes: int, precision: str, efficiency: Efficiency
) -> None:
    efficiency = dataclasses.replace(efficiency, accumulate=0.5, context=0.4, expert=0.7, beside=1.0)
    machine = dataclasses.replace(cores(processes, precision, efficiency), measured=OF_GLOO)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    found = fit_cluster(measured(machine), processes, dtype)
    assert vars(found.efficiency) == pytest.approx(vars(efficiency), rel=1e-6)
    assert vars(found.link) == pytest.approx(vars(LINK), rel=1e-6)
    for name, link in vars(OF_GLOO).items():
        assert vars(getattr(found.measured, name)) == pytest.approx(vars(link), rel=1e-6)
    assert (found.device.peak, found.device.bandwidth) == pytest.approx((1e11, 2e10))
    assert (found.devices, found.nodes) == (processes, 1)


def test_the_benchmark_runs_layouts_that_the_planner_knows() -> None:
    program = (
        "import planner_cpu; config = planner_cpu.BenchmarkConfig(); "
        "assert planner_cpu.planned(config) == list(config.layouts) == list(planner_cpu.LAYOUTS)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT / "benchmarks", capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_interrupted_calibration_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier file stays as it was."""

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(calibrate_module, "measure_cpu", interrupt)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    earlier = tmp_path / "earlier.yaml"
    earlier.write_text("earlier")
    for path in (tmp_path / "new.yaml", earlier):
        with pytest.raises(KeyboardInterrupt):
            calibrate_module.calibrate(path)
    assert list(tmp_path.iterdir()) == [earlier]
    assert earlier.read_text() == "earlier"
