"""Calibration of GPUs: known machines recovered from their times, and all of it run on CPUs."""

from __future__ import annotations

import dataclasses
import re
import socket
import types
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from megatron.planner.calibrate_gpu import (
    Gpu,
    Place,
    Sizes,
    calibrate_gpus,
    describe_gpu,
    fit_gpus,
    precision,
    work,
)
from megatron.planner.calibrate_model import make_job
from megatron.planner.cluster import Cluster, Device, Efficiency, Link, cluster_from_data_sheet
from megatron.planner.description import read_cluster
from megatron.planner.device_specs import data_sheet
from megatron.planner.kernels import Kernels
from megatron.planner.layout import Job, Layout
from megatron.planner.programs import OURS

REACHED = Efficiency(
    matmul=0.7,
    memory=0.8,
    stream=0.85,
    link=0.6,
    attention=0.45,
    network=0.75,
    launch=5e-6,
    attention_backward=0.8,
)
SIZES = Sizes()


def times(machine: Cluster, sizes: Sizes, place: Place) -> dict[str, float]:
    """The times that a calibration measures on a machine that matches the planner's model exactly."""
    efficiency, bandwidth = machine.efficiency, machine.device.bandwidth
    kernels = Kernels(sizes.job, Layout(), machine, OURS)
    model = dataclasses.replace(sizes.job.model, num_attention_heads=sizes.heads, kv_channels=sizes.channels)
    model = dataclasses.replace(model, num_query_groups=sizes.heads)
    attention = Kernels(Job(model, sizes.length, 1024, 1), Layout(), machine, OURS).attention
    found = {
        "product": kernels.matmul(sizes.side, sizes.side, sizes.side),
        "elementwise": 6 * sizes.elements / (bandwidth * efficiency.memory) + efficiency.launch,
        "stream": 6 * sizes.elements / (bandwidth * efficiency.stream) + efficiency.launch,
        "attention forward": attention.forward.total,
        "attention backward": attention.backward.total,
        "launch": efficiency.launch,
        "microbatch": 1.0,
    }
    for name, size, _ in place.groups():
        group = machine.group(size, 1 if name == "node" else place.per_node)
        for message in sizes.messages:
            found[f"{name} {size} {message}"] = machine.all_reduce(message, group)
    return found


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_the_constants_of_a_known_machine_are_recovered(nodes: int) -> None:
    machine = cluster_from_data_sheet(data_sheet("h100", where=""), 8 * nodes)
    machine = dataclasses.replace(machine, efficiency=REACHED)
    place = Place(0, 8 * nodes, 8)
    gpu = Gpu("NVIDIA H100 80GB HBM3", machine.device.memory, 132)
    found = fit_gpus(times(machine, SIZES, place), place, gpu, SIZES)
    expected = vars(REACHED) | ({"network": 1.0} if nodes == 1 else {})
    assert vars(found.efficiency) == pytest.approx(expected, rel=1e-6)
    assert found.device == machine.device and (found.nodes, found.per_node) == (nodes, 8)
    assert vars(found.link) == pytest.approx(vars(machine.link), rel=1e-6)
    if nodes > 1:
        assert vars(found.network) == pytest.approx(vars(machine.network), rel=1e-6)


def test_an_unknown_gpu_has_the_peaks_that_it_reaches() -> None:
    device = Device("mine", "bf16", 1e14, 1, 16e9, 1e12)
    link = Link(5e10, 4e-6)
    reached = dataclasses.replace(REACHED, matmul=1.0, memory=0.9, stream=1.0, link=1.0, network=1.0)
    place = Place(0, 6, 6)
    machine = Cluster(device, 6, 6, link, Link(1e9, 3e-6), reached)
    found = fit_gpus(times(machine, SIZES, place), place, Gpu("mine", 16e9, 60), SIZES)
    assert found.device.peak == pytest.approx(device.peak, rel=1e-3)
    assert found.device.bandwidth == pytest.approx(device.bandwidth, rel=1e-3)
    assert found.efficiency.matmul == pytest.approx(1.0, rel=1e-3)
    assert found.efficiency.memory == pytest.approx(0.9, rel=1e-3)
    assert vars(found.link) == pytest.approx(vars(link), rel=1e-6)


def test_groups_divide_the_processes() -> None:
    groups = {(name, size): ranks for name, size, ranks in Place(3, 12, 6).groups()}
    assert set(groups) == {("node", 2), ("node", 3), ("node", 6), ("network", 2)}
    assert groups["network", 2][0] == [0, 6]
    for ranks in groups.values():
        assert sorted(rank for group in ranks for rank in group) == list(range(12))


TINY = Sizes(
    side=64,
    elements=1 << 14,
    heads=2,
    length=64,
    channels=32,
    messages=(1 << 10, 1 << 14, 1 << 18),
    job=make_job(2, 64, 2, 32),
    launches=10,
    seconds=0.02,
)


def start(rank: int, folder: str, per_node: int) -> None:
    torch.set_num_threads(1)
    work(rank, 2, per_node, f"file://{folder}/store", f"{folder}/here.yaml", "cpu", TINY)


def check_output(out: str, path: Path, group: str | None) -> Cluster:
    """Check what a calibration prints, with the all-reduces of one group if there is one; returns its cluster."""
    lines = re.findall(r"all-reduce of .* MB over 2 \((\w+)\): [\d.,e+]+ us, [\d.]+ GB/s on the links", out)
    assert lines == ([] if group is None else 3 * [group])
    assert re.search(r"check: .* a small GPT took [\d.]+ ms, predicted [\d.]+ ms \([+-]\d+%\)", out)
    machine = read_cluster(path)
    assert machine.device.precision == "bf16" and 0 < machine.efficiency.matmul <= 1
    return machine


def test_a_calibration_runs_on_a_process_of_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work(0, 1, 1, f"file://{tmp_path}/store", f"{tmp_path}/here.yaml", "cpu", TINY)
    assert check_output(capsys.readouterr().out, tmp_path / "here.yaml", None).devices == 1


def test_a_process_of_a_torchrun_takes_its_place_from_the_environment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    places = {
        "RANK": 0,
        "WORLD_SIZE": 1,
        "LOCAL_WORLD_SIZE": 1,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    for name, value in places.items():
        monkeypatch.setenv(name, str(value))
    calibrate_gpus(tmp_path / "here.yaml", "cpu", TINY)
    assert check_output(capsys.readouterr().out, tmp_path / "here.yaml", None).devices == 1


def test_a_gpu_is_described_by_its_properties(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that torch knows, and the precision of one with bf16 and of one without."""
    properties = types.SimpleNamespace(
        name="Tesla V100-SXM2-32GB", total_memory=34072559616, multi_processor_count=80
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    device = torch.device("cuda", 0)
    gpu = describe_gpu(device)
    assert gpu == Gpu("Tesla V100-SXM2-32GB", 34072559616.0, 80)
    machine = cluster_from_data_sheet(data_sheet("v100", where=""), 8)
    machine = dataclasses.replace(machine, efficiency=REACHED)
    found = fit_gpus(times(machine, SIZES, Place(0, 8, 8)), Place(0, 8, 8), gpu, SIZES)
    assert found.device.precision == "fp16" and found.device.memory == gpu.memory
    assert vars(found.efficiency) == pytest.approx(vars(REACHED) | {"network": 1.0}, rel=1e-6)
    for has_bf16, dtype in ((True, torch.bfloat16), (False, torch.float16)):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, x=has_bf16: x)
        assert precision(device) == dtype


@pytest.mark.slow
def test_a_machine_is_measured_by_a_process_for_each_device(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    calibrate_gpus(tmp_path / "here.yaml", "cpu", TINY)
    machine = check_output(capfd.readouterr().out, tmp_path / "here.yaml", "node")
    assert (machine.devices, machine.per_node) == (2, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("per_node", "group"), [(2, "node"), (1, "network")])
def test_a_calibration_runs_on_two_processes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], per_node: int, group: str
) -> None:
    mp.spawn(start, args=(str(tmp_path), per_node), nprocs=2)
    machine = check_output(capfd.readouterr().out, tmp_path / "here.yaml", group)
    assert (machine.devices, machine.per_node) == (2, per_node)
