"""A cluster of devices: what each can do, how they are linked, and how much of that is reached.

Times are in seconds, sizes in bytes, speeds in bytes or floating-point operations per second.
"""

from __future__ import annotations

import dataclasses
import math

from megatron.flags import InputError
from megatron.planner.devices import DataSheet


@dataclasses.dataclass(frozen=True)
class Device:
    """A device in the precision that a run computes in.

    Attributes:
        precision: "bf16", "fp16" or "fp32".
        peak: FLOP/s of matrix products.
        sms: processors that share the tiles of a product; 1 where a product is not divided so.
        memory: bytes.
        bandwidth: bytes/s of memory.
    """

    name: str
    precision: str
    peak: float
    sms: int
    memory: float
    bandwidth: float

    @property
    def element(self) -> int:
        """Bytes of an activation or a weight."""
        return 4 if self.precision == "fp32" else 2


@dataclasses.dataclass(frozen=True)
class Link:
    """How one device reaches others: bytes/s each way for this device, and the seconds of a message of no length."""

    bandwidth: float
    latency: float


@dataclasses.dataclass(frozen=True)
class Reached:
    """How much of what data sheets say is reached, and what small pieces of work cost. The constants of the model.

    Attributes:
        product: share of a device's peak that a large matrix product reaches.
        memory: share of memory bandwidth that operations on activations reach.
        stream: the same of what passes once over all parameters: adding gradients up, the optimizer.
        link: share of a link's bandwidth that collectives and transfers reach.
        attention: share of the peak that fused attention (FlashAttention) reaches.
        launch: seconds that any operation takes beside its work.
    """

    product: float
    memory: float
    stream: float
    link: float
    attention: float
    launch: float


# `product`, `memory` (and with it `stream`) and `link` are fitted to three rows of 2104.04473 table 1: 1.7B (data
# parallelism alone), 18.4B (and tensor), 1T (and pipeline); `python benchmarks/planner.py --fit` does it.
# `attention` is about what FlashAttention 2 (2307.08691 section 4.1) reaches on an A100 forward and backward with a
# causal mask. `launch` is what lies between two kernels of a GPU that is never starved.
DATA_SHEET_REACHED = Reached(
    product=0.843, memory=0.625, stream=0.625, link=0.679, attention=0.55, launch=4e-6
)

# Seconds of a step of a ring between GPUs of a node and between nodes, as NCCL's own choice of algorithms assumes
# them (src/graph/tuning.cc, hwLat of rings with the simple protocol).
NVLINK_LATENCY, NETWORK_LATENCY = 3.4e-6, 9.6e-6


@dataclasses.dataclass(frozen=True)
class Group:
    """Processes that communicate: how many, and how many of them are in the same node."""

    size: int
    per_node: int


@dataclasses.dataclass(frozen=True)
class Cluster:
    """So many devices, in machines of `per_node`; fewer than that are on one. `link` is between devices of a node,
    `network` each device's share of the adapters between nodes."""

    device: Device
    devices: int
    per_node: int
    link: Link
    network: Link
    reached: Reached = DATA_SHEET_REACHED

    @property
    def nodes(self) -> int:
        return -(-self.devices // self.per_node)

    def group(self, size: int, stride: int) -> Group:
        """Processes whose ranks are `stride` apart, on devices that are numbered node after node.

        Such groups fill blocks of size times stride ranks, one after the other. Where blocks and nodes do not divide
        each other, a node's border cuts some of them, and leaves as little as their common divisor in a node: the
        slowest group sets the pace.
        """
        if self.nodes == 1:
            return Group(size, size)
        return Group(size, max(1, math.gcd(size * stride, self.per_node) // stride))

    def all_reduce(self, size: float, group: Group) -> float:
        """Seconds to sum `size` bytes over a group: twice what gathering them takes (ring all-reduce)."""
        return 2 * self.all_gather(size, group)

    def all_gather(self, size: float, group: Group) -> float:
        """Seconds to gather, or to reduce and scatter, `size` bytes in all over a group.

        A ring of g passes (g - 1) / g of them over each link (Patarasuk and Yuan 2009), in g - 1 steps. Rings that
        leave a node do so through the adapters of all its members of the group.
        """
        if group.size == 1:
            return 0.0
        nodes = -(-group.size // group.per_node)
        bandwidth = self.link.bandwidth
        if nodes > 1:
            bandwidth = min(bandwidth, group.per_node * self.network.bandwidth)
        latency = (group.size - nodes) * self.link.latency + (nodes - 1) * self.network.latency
        moved = size * (group.size - 1) / group.size
        return self.reached.launch + latency + moved / (bandwidth * self.reached.link)

    def send(self, size: float) -> float:
        """Seconds to send `size` bytes from a pipeline's stage to the next. With several nodes some neighbours are in
        different ones, and the slowest set the pace."""
        link = self.network if self.nodes > 1 else self.link
        return self.reached.launch + link.latency + size / (link.bandwidth * self.reached.link)


def device_of(sheet: DataSheet) -> Device:
    """A GPU in bf16, or in fp16 where it has no bf16."""
    return Device(
        name=sheet.name,
        precision="bf16" if sheet.bf16 is not None else "fp16",
        peak=(sheet.bf16 or sheet.fp16) * 1e12,
        sms=sheet.sms,
        memory=sheet.memory * 1e9,
        bandwidth=sheet.bandwidth * 1e9,
    )


def of_data_sheet(sheet: DataSheet, devices: int) -> Cluster:
    """So many GPUs, in NVIDIA's machines for them.

    Raises:
        InputError: there is no such machine and they are more than 8, or they do not fill machines.
    """
    per_node, network = sheet.node or (8, None)
    if devices > per_node:
        if network is None:
            raise InputError(
                f"--gpu {sheet.name}: there is no standard machine with more than {per_node} of it; describe the "
                "machines and the network between them in a file for --cluster (docs/scaling.md)"
            )
        if devices % per_node:
            below = devices // per_node * per_node
            raise InputError(
                f"--gpus: {devices} {sheet.name} do not fill machines of {per_node}; choose {below} or "
                f"{below + per_node}"
            )
    return Cluster(
        device=device_of(sheet),
        devices=devices,
        per_node=per_node,
        link=Link(sheet.link / 2 * 1e9, NVLINK_LATENCY),
        network=Link((network or 0) / per_node * 1e9, NETWORK_LATENCY),
    )
