"""The table of GPU data sheets."""

from __future__ import annotations

import pytest
import torch

from megatron.errors import InputError
from megatron.planner.cluster import cluster_from_data_sheet
from megatron.planner.device_specs import DATA_SHEETS, data_sheet, of_torch_name, peak_flops
from megatron.planner.report import command


def test_names_are_unique():
    names = [sheet.name for sheet in DATA_SHEETS]
    assert len(set(names)) == len(names)
    assert all(data_sheet(name.upper(), where="").name == name for name in names)


@pytest.mark.parametrize(
    ("torch_name", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb-pcie"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb-pcie"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA GH200 480GB", "gh200-96gb"),
        ("NVIDIA H200", "h200-141gb"),
        ("Tesla V100-SXM2-16GB", "v100-16gb"),
        ("Tesla V100-SXM2-32GB", "v100-32gb"),
        ("Tesla V100-SXM3-32GB-H", "v100-32gb-dgx2h"),
    ],
)
def test_names_of_torch_distinguish_memory_and_form_factor(torch_name: str, name: str):
    assert of_torch_name(torch_name).name == name


def test_the_machines_of_the_papers():
    """Nodes of arXiv 2104.04473, section 5.1, and arXiv 1909.08053, section 5.

    The former have 8 GPUs of 312 TFLOP/s and 80 GiB, and 8 adapters of 200 Gb/s. The latter have 16 GPUs and 100 GB/s
    between nodes; 39 TFLOP/s are 30% of the peak.
    """
    a100, v100 = data_sheet("a100-80gb", where=""), data_sheet("v100-32gb-dgx2h", where="")
    assert (a100.fp16, a100.memory, a100.link, a100.node) == (312, 80 * 1024, 600, (8, 8 * 200 / 8))
    assert (v100.memory, v100.link, v100.node) == (32 * 1024, 300, (16, 100))
    assert 39 / v100.fp16 == pytest.approx(0.30)


def test_fp8_products_are_twice_as_fast_as_those_in_bf16():
    """On every GPU that has them, from Ada on, by its data sheet."""
    for sheet in DATA_SHEETS:
        has_fp8 = not sheet.name.startswith(("a", "rtx-a", "rtx-3", "v100", "t4"))
        assert (sheet.fp8 is not None) == has_fp8
        if sheet.fp8 is not None:
            assert sheet.fp8 == pytest.approx(2 * sheet.bf16, rel=0.015)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(
        InputError, match=r"^--gpu: 'a101' is not a known GPU; known are gb300.*, t4; describe"
    ):
        data_sheet("a101", where="--gpu")


def test_a_short_name_is_the_usual_form():
    assert data_sheet("H100", where="--gpu").name == "h100-80gb"
    for name, known in (
        ("H100 SXM", "h100-80gb"), ("NVIDIA A100-SXM4-40GB", "a100-40gb"), ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("RTX4090", "rtx-4090"), ("H800", "h800-80gb"), ("GH200", "gh200-96gb"), ("h100 pcie", "h100-pcie"),
    ):  # fmt: skip
        assert data_sheet(name, where="--gpu").name == known


@pytest.mark.parametrize(
    ("name", "half", "fp32"),
    [
        ("Tesla V100-SXM2-32GB", 125, 15.7),
        ("Tesla T4", 65, 8.1),
        ("NVIDIA A100-SXM4-80GB", 312, 19.5),
        ("NVIDIA A100 80GB PCIe", 312, 19.5),
        ("NVIDIA A10G", 70, 35),
        ("NVIDIA H100 80GB HBM3", 989, 67),
        ("NVIDIA H100 PCIe", 756, 51),
        ("NVIDIA H100 NVL", 835, 60),
        ("NVIDIA H200", 989, 67),
        ("NVIDIA GH200 480GB", 989, 67),
        ("NVIDIA B200", 2250, 75),
        ("NVIDIA B300 SXM6 AC", 2250, 75),
        ("NVIDIA GB200", 2500, 80),
        ("NVIDIA GB300", 2500, 80),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 503.8, 126),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 438.9, 109.7),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 468, 120),
        ("AMD Instinct MI300X", 1307.4, 163.4),
        ("NVIDIA L4", 121, 30.3),
        ("NVIDIA L40S", 362, 91.6),
        ("NVIDIA GeForce RTX 4090", 165.2, 82.6),
    ],
)
def test_names_of_torch_are_found(name: str, half: float, fp32: float) -> None:
    assert peak_flops(name, torch.float16) == half * 1e12
    assert peak_flops(name, torch.float32) == fp32 * 1e12
    has_bf16 = not name.startswith("Tesla")
    assert peak_flops(name, torch.bfloat16) == (half * 1e12 if has_bf16 else None)


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H200 MIG 1g.18gb",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "AMD Instinct MI300A",
        "NVIDIA H1000",
    ],
)
def test_unknown_devices_have_no_peak(name: str) -> None:
    assert peak_flops(name, torch.bfloat16) is None


@pytest.mark.parametrize(
    ("gpus", "domain"), [(4, None), (8, 8), (72, 72), (144, 72), (512, 64), (1024, 64), (2304, 72)]
)
def test_an_nvl72_joins_up_to_72_gpus_in_nodes_of_four(gpus: int, domain: int | None) -> None:
    machine = cluster_from_data_sheet(data_sheet("gb200", where=""), gpus)
    assert (machine.per_node, machine.nvlink_domain) == (4, domain)
    assert machine.nodes == gpus // 4


def test_collectives_of_a_rack_take_nvlink() -> None:
    """15/16 of a GB over 16 GPUs at 900 GB/s; across racks of 64 one adapter of 400 Gb/s for each GPU of a group."""
    machine = cluster_from_data_sheet(data_sheet("gb200", where=""), 512)
    share = machine.efficiency.link
    within, across = machine.group(16, 1), machine.group(8, 64)
    assert machine.all_gather(1e9, within) == pytest.approx(15 / 16 * 1e9 / (900e9 * share), rel=0.1)
    assert machine.all_gather(1e9, across) == pytest.approx(7 / 8 * 1e9 / (50e9 * share), rel=0.1)
    assert "--nproc-per-node 4 --nnodes 128" in command([], machine)
