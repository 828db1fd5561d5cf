"""Data sheets of GPUs: peak throughput, memory and links."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

from megatron.errors import InputError

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(frozen=True)
class DataSheet:
    """A GPU with the figures of its data sheet, without sparsity.

    Attributes:
        name: the planner's name for it.
        pattern: regular expression for the end of torch's name.
        sms: streaming multiprocessors.
        fp16, bf16, fp8: dense TFLOP/s with fp32 accumulation; None without native bf16 or FP8.
        fp32: TFLOP/s without TF32.
        memory: MiB, as nvidia-smi reports it with ECC as the GPU is delivered.
        bandwidth: memory bandwidth, GB/s.
        link: GB/s to the other GPUs of a node, both directions added: NVLink, or PCIe where there is no NVLink between
            all of them.
        node: GPUs of a standard node of this kind, and GB/s in each direction of all its network adapters; None if
            there is no such node.
        rack: GPUs that NVLink joins across the nodes of a rack; None if it joins those of a node.
        joined: GPUs of a node of a kind that has no standard one.
    """

    name: str
    pattern: str
    sms: int
    fp16: float
    bf16: float | None
    fp8: float | None
    fp32: float
    memory: float
    bandwidth: float
    link: float
    node: tuple[int, float] | None = None
    rack: int | None = None
    joined: int = 8


# The first matching pattern counts. Nodes are DGX-2H (1909.08053 section 5), DGX A100 (2104.04473 section 5.1),
# DGX-1, DGX H100, H200, B200 and B300 by their data sheets; B300 by that of HGX B300, GB200 and
# GB300 by those of the NVL72, whose nodes (compute trays) have 4 GPUs with a network adapter each. GB200 has the
# multiprocessors that CUDA reports, by public tests of kernels. GH200: the two that NVLink joins in a GH200 NVL2.
# MI300X: data sheet, nodes of 8 with 8 adapters of 400 Gb/s; its Infinity Fabric joins each pair by 128 GB/s. Its
# memory is rocm-smi's.
DATA_SHEETS = tuple(
    DataSheet(*row)
    for row in (
        ("gb300-279gb", r"GB300", 152, 2500, 2500, 5000, 80, 284208, 8000, 1800, (4, 400), 72),
        ("b300-288gb", r"B300( .*)?", 148, 2250, 2250, 4500, 75, 275040, 8000, 1800, (8, 800)),
        ("gb200-186gb", r"GB200", 152, 2500, 2500, 5000, 80, 189471, 8000, 1800, (4, 200), 72),
        ("b200-180gb", r"B200", 148, 2250, 2250, 4500, 75, 183359, 8000, 1800, (8, 400)),
        ("h200-nvl", r"H200 NVL", 132, 835, 835, 1671, 60, 143771, 4800, 128),
        ("h100-pcie", r"H[12]00 PCIe", 114, 756, 756, 1513, 51, 81559, 2000, 128),
        ("h100-nvl", r"H100 NVL", 132, 835, 835, 1671, 60, 95830, 3900, 128),
        ("gh200-96gb", r"GH200( \d+GB.*)?", 132, 989, 989, 1979, 67, 97871, 4000, 900, None, None, 2),
        ("h200-141gb", r"H200( \d+GB.*)?", 132, 989, 989, 1979, 67, 143771, 4800, 900, (8, 400)),
        ("h100-80gb", r"H100( \d+GB.*)?", 132, 989, 989, 1979, 67, 81559, 3350, 900, (8, 400)),
        ("h800-80gb", r"H800( \d+GB.*)?", 132, 989, 989, 1979, 67, 81559, 3350, 400),
        ("h20-96gb", r"H20( \d+GB.*)?", 78, 148, 148, 296, 44, 97871, 4000, 900),
        ("a100-80gb-pcie", r"A100 80GB PCIe", 108, 312, 312, None, 19.5, 81920, 1935, 64),
        ("a100-40gb-pcie", r"A100-PCIE-40GB", 108, 312, 312, None, 19.5, 40960, 1555, 64),
        ("a100-40gb", r"A100\b.*40GB", 108, 312, 312, None, 19.5, 40960, 1555, 600, (8, 200)),
        ("a100-80gb", r"A100\b.*", 108, 312, 312, None, 19.5, 81920, 2039, 600, (8, 200)),
        ("a800-80gb", r"A800\b.*", 108, 312, 312, None, 19.5, 81920, 2039, 400),
        ("a40", r"A40", 84, 149.7, 149.7, None, 37.4, 46068, 696, 64),
        ("a30", r"A30", 56, 165, 165, None, 10.3, 24576, 933, 64),
        ("a10g", r"A10G", 80, 70, 70, None, 35, 23028, 600, 64),
        ("a10", r"A10", 72, 125, 125, None, 31.2, 23028, 600, 64),
        ("rtx-a6000", r"RTX A6000", 84, 154.8, 154.8, None, 38.7, 49140, 768, 64),
        ("l40s", r"L40S", 142, 362, 362, 733, 91.6, 46068, 864, 64),
        ("l40", r"L40", 142, 181, 181, 362, 90.5, 46068, 864, 64),
        ("l4", r"L4", 58, 121, 121, 242.5, 30.3, 23034, 300, 64),
        ("rtx-6000-ada", r"RTX 6000 Ada Generation", 142, 364, 364, 728.5, 91.1, 49140, 960, 64),
        # Workstation and Max-Q are in table 4 of NVIDIA's paper on the RTX Blackwell PRO architecture. The page of the
        # Server has 234 TFLOP/s in TF32, a half of fp16 in that table, and rounds fp16 to 1 PFLOP/s, with sparsity.
        (
            "rtx-pro-6000-max-q",
            r"RTX PRO 6000 Blackwell Max-Q.*",
            188,
            438.9,
            438.9,
            877.9,
            109.7,
            97887,
            1792,
            128,
        ),
        (
            "rtx-pro-6000-server",
            r"RTX PRO 6000 Blackwell Server.*",
            188,
            468,
            468,
            936,
            120,
            97887,
            1597,
            128,
        ),
        ("rtx-pro-6000", r"RTX PRO 6000 Blackwell.*", 188, 503.8, 503.8, 1007.6, 126, 97887, 1792, 128),
        ("rtx-5090", r"RTX 5090", 170, 209.5, 209.5, 419, 104.8, 32607, 1792, 128),
        ("rtx-4090", r"RTX 4090", 128, 165.2, 165.2, 330.3, 82.6, 24564, 1008, 64),
        ("rtx-3090", r"RTX 3090", 82, 71, 71, None, 35.6, 24576, 936, 64),
        # The DGX-2H's draws 450 W: 39 TFLOP/s are 30% of its peak (1909.08053 section 5.1).
        ("v100-32gb-dgx2h", r"V100-SXM3-32GB-H", 80, 130, None, None, 16.25, 32768, 900, 300, (16, 100)),
        ("v100-16gb", r"V100-SXM2-16GB", 80, 125, None, None, 15.7, 16384, 900, 300, (8, 50)),
        ("v100-32gb", r"V100-SXM\d.*", 80, 125, None, None, 15.7, 32768, 900, 300, (8, 50)),
        ("mi300x-192gb", r"MI300X( .*)?", 304, 1307.4, 1307.4, 2614.9, 163.4, 196592, 5300, 896, (8, 400)),
        ("v100-pcie", r"V100-PCIE.*", 80, 112, None, None, 14, 16384, 900, 32),
        ("t4", r"T4", 40, 65, None, None, 8.1, 15360, 320, 32),
    )
)

# Links to the host, bytes/s in each direction, by the beginnings of the planner's names. NVLink-C2C: 900 GB/s in both
# directions for each Grace, which GB200 and GB300 have for two GPUs. PCIe of 16 lanes: 32 GB/s with generation 4, which
# GPUs that are not named have, twice that with 5 (MLPerf's systems of H100, H200 and B200) and half with 3.
PCIE3, PCIE4, PCIE5 = 16e9, 32e9, 64e9
HOST_LINKS = {
    450e9: ("gh200",),
    225e9: ("gb200", "gb300"),
    PCIE5: ("h100", "h200", "h800", "h20", "b200", "b300", "mi300x", "rtx-pro", "rtx-5090"),
    PCIE3: ("v100", "t4"),
}
# Memory and its bandwidth of the hosts of standard nodes, bytes and bytes/s for each GPU.
#
# Memory: the system descriptions of NVIDIA's MLPerf inference results have 2 TB in DGX A100 with 80GB (v1.1), in DGX
# H100 (v3.1) and H200 (v4.1), and those of an 8-GPU node of B200 as much (v6.0). DGX A100 with 40GB was announced with
# 1 TB, DGX-1 has 512 GB of DDR4-2133 (a post in NVIDIA's developer forum). DGX-2H, B300, NVL72 and GH200: data sheets.
#
# Bandwidth: that of the data sheet for NVL72 and GH200. For x86 hosts it is that of the channels of both CPUs, 8 bytes
# a transfer: 16 channels, but 12 in DGX-2H and 8 in DGX-1. DGX H100, H200 and B200 have 32 modules, two a channel,
# with which Xeons of the 4th generation reach 4,400 MT/s; those of the 5th in B200 are taken to do the same. DGX B300
# is taken to have one a channel.
DDR4_2133, DDR4_2666, DDR4_3200, DDR5_4400, DDR5_6400 = (
    17.1e9,
    21.3e9,
    25.6e9,
    35.2e9,
    51.2e9,
)  # bytes/s a channel
HOST_MEMORY = {
    ("gb200", "gb300"): (17e12 / 72, 14e12 / 72),
    ("gh200",): (480e9, 512e9),
    ("b300-",): (2e12 / 8, 16 * DDR5_6400 / 8),
    ("b200-", "h100-80gb", "h200-141gb"): (2e12 / 8, 16 * DDR5_4400 / 8),
    ("a100-80gb",): (2e12 / 8, 16 * DDR4_3200 / 8),
    ("a100-40gb",): (1e12 / 8, 16 * DDR4_3200 / 8),
    ("v100-32gb-dgx2h",): (1.5e12 / 16, 12 * DDR4_2666 / 16),
    ("v100-16gb", "v100-32gb"): (512e9 / 8, 8 * DDR4_2133 / 8),
}


# The usual form of a GPU that has several.
ALIASES = {
    "v100": "v100-32gb",
    "a100": "a100-80gb",
    "h100": "h100-80gb",
    "h200": "h200-141gb",
    "h800": "h800-80gb",
    "h20": "h20-96gb",
    "a800": "a800-80gb",
    "gh200": "gh200-96gb",
    "b200": "b200-180gb",
    "gb200": "gb200-186gb",
    "b300": "b300-288gb",
    "gb300": "gb300-279gb",
    "mi300x": "mi300x-192gb",
}


def of_torch_name(name: str) -> DataSheet | None:
    """Find a GPU by torch's name; None if it is not in the table or is a MIG slice."""
    if " MIG " in name:
        return None
    return next((d for d in DATA_SHEETS if re.search(rf"(^|\s){d.pattern}$", name)), None)


def peak_flops(name: str, dtype: torch.dtype) -> float | None:
    """FLOP/s in `dtype` of a GPU, by torch's name; None if unknown or a MIG slice."""
    sheet = of_torch_name(name)
    if sheet is None:
        return None
    tflops = {"float16": sheet.fp16, "bfloat16": sheet.bf16, "float32": sheet.fp32}
    found = tflops[str(dtype).removeprefix("torch.")]
    return None if found is None else found * 1e12


def host_link(name: str) -> float:
    """Bytes/s in each direction of a device's link to its host, by the planner's name of the device."""
    return next((link for link, names in HOST_LINKS.items() if name.lower().startswith(names)), PCIE4)


def host_memory(name: str) -> tuple[float, float] | tuple[None, None]:
    """Memory of the host and its bandwidth for each GPU of a standard node; None if there is no such node."""
    if name.endswith("-pcie"):
        return None, None
    return next((host for names, host in HOST_MEMORY.items() if name.startswith(names)), (None, None))


def data_sheet(name: str, *, where: str) -> DataSheet:
    """Find a GPU by its name here, ignoring case, spaces, hyphens, vendor, socket (SXM) and kind of memory (HBM).

    Raises:
        InputError: there is none of that name; `where` names the flag or file that gave it.
    """
    wanted = _simplified(name)
    wanted = _simplified(ALIASES.get(wanted, wanted))
    for sheet in DATA_SHEETS:
        if _simplified(sheet.name) == wanted:
            return sheet
    known = ", ".join(sheet.name for sheet in DATA_SHEETS)
    raise InputError(
        f"{where}: {name!r} is not a known GPU; known are {known}; describe another in a file for --cluster "
        "(docs/scaling.md)"
    )


def _simplified(name: str) -> str:
    """Normalize a GPU's name: "NVIDIA H100 80GB HBM3" becomes "h10080gb"."""
    return re.sub(r"nvidia|geforce|tesla|sxm\d?|hbm\d?e?|[-_ ]", "", name.lower())
