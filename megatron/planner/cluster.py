"""A cluster: the devices, the links between them, and the share of their peaks that programs reach.

Times are in seconds, sizes in bytes, speeds in bytes/s or FLOP/s.
"""

from __future__ import annotations

import dataclasses
import math

from megatron.errors import InputError
from megatron.planner.device_specs import PCIE4, DataSheet, host_link, host_memory
from megatron.planner.routing import Routing


@dataclasses.dataclass(frozen=True)
class Device:
    """A device, in the precision that a run computes in.

    Attributes:
        precision: "bf16", "fp16" or "fp32".
        peak: FLOP/s of matrix products.
        sms: streaming multiprocessors, which share the tiles of a matrix product; 1 disables the tile model.
        memory: bytes.
        bandwidth: bytes/s of memory.
        fp8: FLOP/s of FP8 products; None if it has none.
    """

    name: str
    precision: str
    peak: float
    sms: int
    memory: float
    bandwidth: float
    fp8: float | None = None

    @property
    def is_cpu(self) -> bool:
        """True for a core, which computes, reads memory and communicates in turn."""
        return self.name == "cpu"

    @property
    def element(self) -> int:
        """Bytes of an activation or a weight."""
        return 4 if self.precision == "fp32" else 2


@dataclasses.dataclass(frozen=True)
class Link:
    """A device's connection to others: bytes/s in each direction, and seconds of latency."""

    bandwidth: float
    latency: float


@dataclasses.dataclass(frozen=True)
class Host:
    """A device's share of the host of its node.

    Attributes:
        bandwidth: bytes/s in each direction of the device's link to it.
        memory: bytes; None if they are not known, and every run fits.
        memory_bandwidth: bytes/s of this memory, read and written; None if it limits no copies.
    """

    bandwidth: float = PCIE4
    memory: float | None = None
    memory_bandwidth: float | None = None

    @property
    def copy(self) -> float:
        """Bytes/s that a copy in one direction reaches."""
        return HOST_EFFICIENCY * min(self.bandwidth, self.memory_bandwidth or math.inf)

    @property
    def exchange(self) -> float:
        """Bytes/s that copies in both directions at once reach in each."""
        return HOST_EFFICIENCY * min(self.bandwidth, (self.memory_bandwidth or math.inf) / 2)


@dataclasses.dataclass(frozen=True)
class Efficiency:
    """Shares of the peaks that programs reach, and the overhead of an operation. The constants of the cost model.

    Attributes:
        matmul: share of a device's peak that a large matrix product reaches.
        memory: share of memory bandwidth that element-wise operations on activations reach.
        stream: share of memory bandwidth that one pass over all parameters reaches: accumulating gradients, the
            optimizer.
        link: share of the bandwidth of links within a node that collectives and transfers reach.
        attention: share of the peak that fused attention (FlashAttention) reaches in forward.
        network: share of the bandwidth between nodes that they reach.
        launch: seconds of overhead of any operation.
        attention_backward: speed of fused attention in backward over that in forward.
        context: speed of attention to the keys of other ranks (ring attention, gathered keys) over that of others.
        fp8: share of the FP8 peak that a large matrix product reaches, over `matmul`.
        expert: speed of the grouped products of experts over that of others.
        accumulate: speed of accumulating gradients over that of other passes over all parameters.
        all_to_all, send: speed of these over the formulas'.
        beside: share of a device that communication takes from computation beside it: 20 of the 132 SMs of an H100
            saturate its links (2412.19437 section 3.2.2).
    """

    matmul: float
    memory: float
    stream: float
    link: float
    attention: float
    network: float
    launch: float
    attention_backward: float = 1.0
    context: float = 1.0
    fp8: float = 1.0
    expert: float = 1.0
    accumulate: float = 1.0
    all_to_all: float = 1.0
    send: float = 1.0
    beside: float = 0.1515


@dataclasses.dataclass(frozen=True)
class Measured:
    """Bandwidth and latency that a calibration measured of single collectives; None of those that the links tell.

    They are those for which the formulas of `Cluster` give the measured seconds.
    """

    all_gather: Link | None = None
    reduce_scatter: Link | None = None
    all_to_all: Link | None = None
    send: Link | None = None
    shift: Link | None = None


# Share of a host's bandwidths that large copies from pinned memory reach: assumed, not measured.
HOST_EFFICIENCY = 0.8

# `matmul`, `memory` (`stream` equals it) and `link` are fitted to three rows of 2104.04473 table 1: 1.7B (data
# parallelism only), 18.4B (adds tensor parallelism), 1T (adds pipeline parallelism). `python benchmarks/planner.py
# --fit` fits them. `attention` is about what FlashAttention 2 (2307.08691 section 4.1) reaches on an A100 forward and
# backward with a causal mask. `launch` is the gap between two kernels of a GPU that is never starved.
DATA_SHEET_EFFICIENCY = Efficiency(
    matmul=0.843, memory=0.625, stream=0.625, link=0.679, attention=0.55, network=0.679, launch=4e-6
)

# Latency of one ring step between GPUs of a node and between nodes, as NCCL's choice of algorithms assumes it
# (src/graph/tuning.cc, hwLat of rings with the simple protocol).
NVLINK_LATENCY, NETWORK_LATENCY = 3.4e-6, 9.6e-6


@dataclasses.dataclass(frozen=True)
class Group:
    """A process group: its size, and how many of its members share an NVLink domain."""

    size: int
    per_domain: int


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Devices in nodes of `per_node`; a cluster smaller than that is one node.

    Attributes:
        link: between devices of an NVLink domain.
        network: each device's share of its node's network adapters.
        nvlink_domain: devices that `link` joins, where they are in several nodes (NVL72); None for those of a node.
        host: each device's share of its host.
        measured: collectives within a node that differ from `link`.
    """

    device: Device
    devices: int
    per_node: int
    link: Link
    network: Link
    efficiency: Efficiency = DATA_SHEET_EFFICIENCY
    nvlink_domain: int | None = None
    host: Host = Host()
    measured: Measured = Measured()

    @property
    def nodes(self) -> int:
        return -(-self.devices // self.per_node)

    @property
    def per_domain(self) -> int:
        """Devices that `link` joins."""
        return self.nvlink_domain or self.per_node

    def _inside(self, link: Link) -> float:
        """Bytes/s that a device reaches over `link` to the others of its NVLink domain."""
        return link.bandwidth * self.efficiency.link

    @property
    def _outside(self) -> float:
        """Bytes/s that a device reaches to other domains, over its share of the network adapters."""
        return self.network.bandwidth * self.efficiency.network

    def group(self, size: int, stride: int) -> Group:
        """Return the group of ranks `stride` apart, if ranks are numbered node after node.

        Such groups fill consecutive blocks of size x stride ranks. Where blocks and NVLink domains do not divide each
        other, borders of domains cut some groups and leave gcd(block, domain) ranks of the block in one domain. The
        slowest group determines the speed.
        """
        if self.devices <= self.per_domain:
            return Group(size, size)
        return Group(size, max(1, math.gcd(size * stride, self.per_domain) // stride))

    def all_reduce(self, size: float, group: Group) -> float:
        """Seconds to sum `size` bytes over a group by a ring: a reduce-scatter and an all-gather."""
        return 2 * self._ring(size, group, self.link)

    def all_gather(self, size: float, group: Group) -> float:
        """Seconds to all-gather `size` bytes (the whole tensor) over a group."""
        return self._ring(size, group, self.measured.all_gather or self.link)

    def reduce_scatter(self, size: float, group: Group) -> float:
        """Seconds to reduce-scatter `size` bytes (the whole tensor) over a group."""
        return self._ring(size, group, self.measured.reduce_scatter or self.link)

    def _ring(self, size: float, group: Group, link: Link) -> float:
        """Seconds of a ring through which `size` bytes pass once.

        A ring of g ranks sends (g - 1) / g of the tensor over each link in g - 1 steps (Patarasuk and Yuan 2009).
        Rings that leave a domain use the adapters of all members in that domain.
        """
        if group.size == 1:
            return 0.0
        domains = -(-group.size // group.per_domain)
        bandwidth = self._inside(link)
        if domains > 1:
            bandwidth = min(bandwidth, group.per_domain * self._outside)
        latency = (group.size - domains) * link.latency + (domains - 1) * self.network.latency
        sent = size * (group.size - 1) / group.size
        return self.efficiency.launch + latency + sent / bandwidth

    def all_to_all(self, size: float, group: Group) -> float:
        """Seconds for each rank to send an equal part of its `size` bytes to every rank of a group.

        All parts are sent at once. Those for other domains take the rank's own network adapter.
        """
        if group.size == 1:
            return 0.0
        link = self.measured.all_to_all or self.link
        inside, outside = (group.per_domain - 1) / group.size, (group.size - group.per_domain) / group.size
        seconds = inside / self._inside(link)
        if outside:
            seconds = max(seconds, outside / self._outside)
        latency = self.network.latency if outside else link.latency
        return (self.efficiency.launch + latency + size * seconds) / self.efficiency.all_to_all

    def dispatch(self, size: float, routing: Routing, group: Group) -> float:
        """Seconds for each rank to send its `size` bytes of tokens to the ranks that have their experts.

        A token is sent once to each other domain that needs it, over the rank's own network adapter, and there once to
        each rank that does (2412.19437 section 3.2.2; DeepEP, HybridEP).
        """
        if group.size == 1:
            return 0.0
        domains, inside = group.size / group.per_domain, (group.per_domain - 1) / group.per_domain
        outside = routing.distinct(domains) * (domains - 1) / domains
        seconds = max(
            routing.distinct(group.size) * inside / self._inside(self.link),
            outside / self._outside if outside else 0.0,
        )
        latency = self.network.latency if outside else self.link.latency
        return (self.efficiency.launch + latency + size * seconds) / self.efficiency.all_to_all

    def send(self, size: float, group: Group) -> float:
        """Seconds to send `size` bytes to the next rank of a group."""
        return self._neighbor(size, group, self.measured.send or self.link) / self.efficiency.send

    def exposed(self, seconds: float, latency: float, compute: float) -> float:
        """Seconds that communication adds to `compute` seconds of computation beside it.

        Args:
            seconds: of the communication.
            latency: of the same communication without data, during which it takes nothing from computation.
        """
        hidden = min(seconds, compute)
        return seconds - hidden + self.efficiency.beside * max(0.0, hidden - latency)

    def shift(self, size: float, group: Group) -> float:
        """Seconds for each rank of a group to send `size` bytes to the next one, and to receive as many."""
        return self._neighbor(size, group, self.measured.shift or self.link)

    def _neighbor(self, size: float, group: Group, link: Link) -> float:
        """Seconds of `size` bytes between neighbors.

        In a group of several domains some neighbors are in different ones, and the slowest determine the speed.
        """
        crosses = group.per_domain < group.size
        latency, bandwidth = (
            (self.network.latency, self._outside) if crosses else (link.latency, self._inside(link))
        )
        return self.efficiency.launch + latency + size / bandwidth


def device_from_data_sheet(sheet: DataSheet) -> Device:
    """Return a GPU in bf16, or in fp16 if it has no bf16."""
    return Device(
        name=sheet.name,
        precision="bf16" if sheet.bf16 is not None else "fp16",
        peak=(sheet.bf16 or sheet.fp16) * 1e12,
        sms=sheet.sms,
        memory=sheet.memory * 2**20,
        bandwidth=sheet.bandwidth * 1e9,
        fp8=None if sheet.fp8 is None else sheet.fp8 * 1e12,
    )


def host_from_data_sheet(name: str) -> Host:
    """Return a GPU's share of the host of its standard node, by the planner's name of the GPU."""
    return Host(host_link(name), *host_memory(name))


def cluster_from_data_sheet(sheet: DataSheet, devices: int, *, where: str = "--gpus") -> Cluster:
    """Return a cluster of `devices` GPUs in the standard nodes (DGX) or racks (NVL72) for them.

    Args:
        where: flag that gives their number, for errors.

    Raises:
        InputError: there is no standard node for so many of them, or the GPUs do not fill whole nodes.
    """
    per_node, network = sheet.node or (sheet.joined, None)
    domain = None
    if devices > per_node:
        if network is None:
            raise InputError(
                f"--gpu {sheet.name}: no standard node has more than {per_node} of them; describe nodes and network "
                "in a file for --cluster (docs/scaling.md)"
            )
        if devices % per_node:
            below = devices // per_node * per_node
            raise InputError(
                f"{where}: {devices} {sheet.name} do not fill nodes of {per_node}; choose {below} or "
                f"{below + per_node}"
            )
        if sheet.rack is not None:
            domain = devices_per_rack(devices, per_node, sheet.rack)
    return Cluster(
        device=device_from_data_sheet(sheet),
        devices=devices,
        per_node=per_node,
        link=Link(sheet.link / 2 * 1e9, NVLINK_LATENCY),
        network=Link((network or 0) / per_node * 1e9, NETWORK_LATENCY),
        nvlink_domain=domain,
        host=host_from_data_sheet(sheet.name),
    )


def devices_per_rack(devices: int, per_node: int, rack: int) -> int:
    """Devices of each rack if as few racks of at most `rack` devices as possible share whole nodes equally.

    512 GPUs take 8 racks of 64, not 7 of 72 and one of 8: groups of powers of two then stay in their racks.
    """
    nodes = devices // per_node
    racks = next(n for n in range(-(-devices // rack), nodes + 1) if nodes % n == 0)
    return devices // racks
