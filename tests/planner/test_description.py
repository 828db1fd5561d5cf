"""Cluster description files."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from published import cluster

from megatron.errors import InputError
from megatron.planner.cluster import Link, Measured
from megatron.planner.description import describe, quantity, read_cluster
from megatron.planner.device_specs import DATA_SHEETS
from megatron.planner.profiles import find_constants

FILE = """
device: a100-80gb
devices-per-node: 8
nodes: 4
link: {bandwidth: 300 GB/s, latency: 3.4 us}
network: {bandwidth: 200 Gb/s}
"""


def read(folder: Path, text: str):
    path = folder / "cluster.yaml"
    path.write_text(text)
    return read_cluster(path)


def test_a_file_equals_the_table(tmp_path: Path):
    machine, table = read(tmp_path, FILE), cluster(32)
    assert (machine.device, machine.nodes) == (table.device, 4)
    for ours, theirs in ((machine.link, table.link), (machine.network, table.network)):
        assert vars(ours) == pytest.approx(vars(theirs))


@pytest.mark.parametrize("name", [sheet.name for sheet in DATA_SHEETS])
def test_a_gpu_of_the_table_reaches_what_it_does_without_a_file(tmp_path: Path, name: str):
    usual = find_constants(name).efficiency
    assert read(tmp_path, FILE.replace("a100-80gb", name)).efficiency == usual
    some = read(tmp_path, FILE.replace("a100-80gb", name) + "efficiency: {matmul: 0.5, link: 0.4}\n")
    assert some.efficiency == dataclasses.replace(usual, matmul=0.5, link=0.4, network=0.4)


def test_round_trip(tmp_path: Path):
    measured = Measured(all_gather=Link(1e9, 2e-6), shift=Link(5e9, 1e-3))
    machine = dataclasses.replace(cluster(64, "h100-80gb"), measured=measured)
    again = read(tmp_path, describe(machine))
    assert again.device.peak == pytest.approx(machine.device.peak)
    assert again.link.bandwidth == pytest.approx(machine.link.bandwidth)
    assert (again.efficiency, again.devices) == (machine.efficiency, 64)
    assert again.measured == measured


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("80 GB", "memory", 80e9),
        ("80GiB", "memory", 80 * 2**30),
        ("200 Gb/s", "speed", 25e9),
        ("1.6e3 GB/s", "speed", 1.6e12),
        ("312 TFLOP/s", "arithmetic", 312e12),
        ("5 us", "time", 5e-6),
    ],
)
def test_units(text: str, kind: str, value: float):
    assert quantity(text, kind) == pytest.approx(value)


CUSTOM = "{name: x, precision: bf16, peak: 1 TFLOP/s, memory: 1 GB, bandwidth: 1 GB/s}"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("300 GB/s", "300 GB", r"link\.bandwidth: '300 GB' is not a positive number with a unit \(MB/s, .* or Tb/s\); "
            r"write it like '600 GB/s'"),
        ("300 GB/s", "300", r"link\.bandwidth: 300 is not a positive number with a unit"),
        ("3.4 us", "-3 us", r"link\.latency: '-3 us' is not"),
        ("a100-80gb", "a100-800gb", r"device: 'a100-800gb' is not a known GPU; known are .*a100-80gb"),
        ("a100-80gb", CUSTOM.replace("1 GB,", "1 GB/s,"), r"device\.memory: '1 GB/s' is not .*; write it like '80 GB'"),
        ("a100-80gb", CUSTOM.replace("bf16", "fp8"), r"device\.precision: 'fp8' is not one of bf16, fp16, fp32"),
        ("a100-80gb", CUSTOM.replace("peak", "peek"), r"device\.peak is missing, and peek is not a field;"),
        ("nodes: 4", "nodes: four", r"nodes: 'four' is not an integer of at least 1"),
        ("nodes: 4", "nodes: 4\nracks: 2",
            r"racks is not a field; the fields are nodes, devices-per-node, nvlink-domain, device, .*, host$"),
        ("a100-80gb", f"{CUSTOM}\nracks: 2",
            r"racks is not a field; the fields are nodes, devices-per-node, nvlink-domain, device, .*, host$"),
        ("a100-80gb", "[a100-80gb]", r"device: \['a100-80gb'\] is neither the name of a GPU nor a mapping"),
        ("a100-80gb", "", r"device is missing; docs/scaling\.md has an example"),
        ("nodes: 4", "nodes: 4\nefficiency: {link: 66}", r"efficiency\.link: 66 must be above 0 and at most 1"),
        ("nodes: 4", "nodes: 4\nefficiency: {beside: 3}", r"efficiency\.beside: 3 must be above 0 and at most 1"),
        ("network: {bandwidth: 200 Gb/s}", "", r"network is missing"),
        ("link: {", "link: 5 # {", r"link: 5 is not a mapping"),
        ("nodes: 4", "nodes: 4\nnvlink-domain: 12", r"nvlink-domain: 12 devices are not whole nodes of 8"),
        ("nodes: 4", "nodes: [", r"line \d+: is not YAML"),
    ],
)  # fmt: skip
def test_errors_name_the_field(tmp_path: Path, old: str, new: str, message: str):
    assert old in FILE
    with pytest.raises(InputError, match=r"^--cluster .*cluster\.yaml: " + message):
        read(tmp_path, FILE.replace(old, new))


def test_missing_file(tmp_path: Path):
    with pytest.raises(InputError, match=r"--cluster .*none\.yaml: cannot be read \(No such file"):
        read_cluster(tmp_path / "none.yaml")


def test_an_empty_section_equals_a_missing_one(tmp_path: Path):
    assert read(tmp_path, FILE + "efficiency:\n").efficiency == cluster(8).efficiency


def test_a_small_efficiency_survives_a_round_trip(tmp_path: Path):
    machine = cluster(8)
    slow = dataclasses.replace(machine, efficiency=dataclasses.replace(machine.efficiency, attention=1.25e-5))
    assert read(tmp_path, describe(slow)).efficiency == slow.efficiency


def test_the_peak_of_fp8_products_is_optional(tmp_path: Path):
    text = FILE.replace("a100-80gb", CUSTOM.replace("x,", "x, fp8: 2 TFLOP/s,"))
    machine = read(tmp_path, text)
    assert machine.device.fp8 == 2e12
    assert read(tmp_path, describe(machine)).device == machine.device
    assert read(tmp_path, FILE.replace("a100-80gb", CUSTOM)).device.fp8 is None


def test_an_nvlink_domain_may_have_several_nodes(tmp_path: Path):
    machine = read(tmp_path, FILE.replace("nodes: 4", "nodes: 4\nnvlink-domain: 16"))
    assert (machine.per_node, machine.per_domain) == (8, 16)
    assert read(tmp_path, describe(machine)).nvlink_domain == 16


def test_one_node_needs_no_network(tmp_path: Path):
    text = FILE.replace("network: {bandwidth: 200 Gb/s}", "").replace("nodes: 4", "nodes: 1")
    assert read(tmp_path, text).devices == 8
