"""Measure the GPUs of a machine in a minute or two and write a file for `megatron plan --cluster`.

One process per GPU measures matrix products, attention, memory and collectives, all at the same time. Started by
torchrun on several machines it also measures the network between them. No GPU has run this yet: the tests run it on
CPUs, and fit the times of known machines.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F

from megatron.ops.backend import choose_ops
from megatron.ops.config import OpsConfig
from megatron.planner.attention_costs import ATTENTION_BLOCK
from megatron.planner.calibrate_model import build_model, checked, make_job, microbatch
from megatron.planner.cluster import Cluster, Device, Efficiency, Link, device_from_data_sheet
from megatron.planner.description import describe
from megatron.planner.device_specs import of_torch_name
from megatron.planner.kernels import Kernels
from megatron.planner.layout import Job, Layout
from megatron.planner.programs import OURS
from megatron.planner.simulate import Simulator
from megatron.tool import write_output_file

MIN_LATENCY = 1e-7  # seconds


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the measured operations.

    Attributes:
        side: rows and columns of a matrix product.
        elements: of the operations that memory bounds.
        heads, length, channels: of causal attention.
        messages: bytes of the all-reduces, the smallest first.
        job: a small GPT, whose microbatch the measured speeds are compared with.
        launches: tiny operations that are timed together.
        seconds: spent on each measurement, about.
    """

    side: int = 8192
    elements: int = 1 << 28
    heads: int = 32
    length: int = 4096
    channels: int = 128
    messages: tuple[int, ...] = (1 << 16, 1 << 24, 1 << 28)
    job: Job = dataclasses.field(default_factory=functools.partial(make_job, 4, 4096, 32, 4096))
    launches: int = 200
    seconds: float = 0.5


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A device as torch describes it: its name, bytes of memory, and multiprocessors."""

    name: str
    memory: float
    sms: int


@dataclasses.dataclass(frozen=True)
class Place:
    """A process: its rank, the number of processes, and those of a machine."""

    rank: int
    processes: int
    per_node: int

    def groups(self) -> Iterator[tuple[str, int, list[list[int]]]]:
        """Yield the groups to measure: a name, the size, and the ranks of all such groups, which divide the processes.

        Within a machine these are neighbors; between machines the processes of the same number.
        """
        for size in range(2, self.per_node + 1):
            if self.per_node % size == 0:
                yield "node", size, [list(range(i, i + size)) for i in range(0, self.processes, size)]
        nodes = self.processes // self.per_node
        if nodes > 1:
            yield (
                "network",
                nodes,
                [list(range(i, self.processes, self.per_node)) for i in range(self.per_node)],
            )


def calibrate_gpus(path: Path, kind: str = "cuda", sizes: Sizes | None = None) -> None:
    """Measure the GPUs of this machine, or as one process of a torchrun, and write the file.

    Args:
        kind: kind of device; on "cpu" two processes stand in for GPUs.
    """
    sizes = sizes or Sizes()
    if "RANK" in os.environ:
        rank, processes, per_node = (int(os.environ[x]) for x in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
        work(rank, processes, per_node, "env://", str(path), kind, sizes)
        return
    devices = torch.cuda.device_count() if kind == "cuda" else 2
    with tempfile.TemporaryDirectory() as folder:  # a file of an earlier run would end the rendezvous at once
        rendezvous = f"file://{folder}/rendezvous"
        mp.spawn(work, args=(devices, devices, rendezvous, str(path), kind, sizes), nprocs=devices)


def work(
    rank: int, processes: int, per_node: int, rendezvous: str, path: str, kind: str, sizes: Sizes
) -> None:
    """Measure as one process; the first prints the results and writes the file."""
    place = Place(rank, processes, per_node)
    device = torch.device("cuda", rank % per_node) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=processes)
    seconds = measure(place, device, sizes)
    if rank == 0:
        report(seconds, place, describe_gpu(device), sizes, Path(path))
    dist.barrier()
    dist.destroy_process_group()


def describe_gpu(device: torch.device) -> Gpu:
    """The device; for a CPU, which stands in for a GPU in tests, a made-up one."""
    if device.type != "cuda":
        return Gpu("stand-in", 8e9, 1)
    properties = torch.cuda.get_device_properties(device)
    return Gpu(properties.name, float(properties.total_memory), properties.multi_processor_count)


def measure(place: Place, device: torch.device, sizes: Sizes) -> dict[str, float]:
    """Seconds of each operation, the mean of all processes, by name; all-reduces as "group size bytes"."""
    runs = {**_operations(device, sizes), **_collectives(place, device, sizes), **_model(device, sizes)}
    seconds = {name: _time(run, device, sizes.seconds) for name, run in runs.items()}
    seconds["launch"] /= sizes.launches
    means = torch.tensor(list(seconds.values()), dtype=torch.float32, device=device)
    dist.all_reduce(means)
    return dict(zip(seconds, (means / place.processes).tolist(), strict=True))


def precision(device: torch.device) -> torch.dtype:
    """bf16, or fp16 on a GPU without it."""
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.float16
    return torch.bfloat16


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _time(run: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Mean seconds of a call after warming up, equally many on each process."""
    for _ in range(2):
        run()
    _synchronize(device)
    begin = time.perf_counter()
    run()
    _synchronize(device)
    count = torch.tensor(seconds / max(time.perf_counter() - begin, 1e-6), device=device)
    dist.all_reduce(count, dist.ReduceOp.MIN)
    calls = min(1000, max(3, int(count)))
    dist.barrier()
    _synchronize(device)
    begin = time.perf_counter()
    for _ in range(calls):
        run()
    _synchronize(device)
    return (time.perf_counter() - begin) / calls


def _operations(device: torch.device, sizes: Sizes) -> dict[str, Callable[[], object]]:
    """Operations of one device in 16 bits, but for sums in fp32 as in accumulating gradients."""
    make = functools.partial(torch.randn, device=device, dtype=precision(device))
    a, b = make(sizes.side, sizes.side), make(sizes.side, sizes.side)
    x, y, out = make(sizes.elements), make(sizes.elements), make(sizes.elements)
    gradient, total = torch.randn(2, sizes.elements // 2, device=device)
    shape = 1, sizes.heads, sizes.length, sizes.channels
    q, k, v = (make(shape).requires_grad_() for _ in range(3))
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    to_attended, tiny = make(shape), make(1)

    def forward() -> None:
        with torch.no_grad():
            F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def launch() -> None:
        for _ in range(sizes.launches):
            tiny.add_(1)

    return {
        "product": lambda: torch.mm(a, b),
        "elementwise": lambda: torch.add(x, y, out=out),
        "stream": lambda: total.add_(gradient),
        "attention forward": forward,
        "attention backward": lambda: torch.autograd.grad(
            attended, (q, k, v), to_attended, retain_graph=True
        ),
        "launch": launch,
    }


def _collectives(place: Place, device: torch.device, sizes: Sizes) -> dict[str, Callable[[], object]]:
    """All-reduces by group and size."""
    runs: dict[str, Callable[[], object]] = {}
    for name, size, groups in place.groups():
        made = [dist.new_group(ranks) for ranks in groups]
        mine = next(group for group, ranks in zip(made, groups, strict=True) if place.rank in ranks)
        for message in sizes.messages:
            tensor = torch.zeros(message // 2, dtype=precision(device), device=device)
            runs[f"{name} {size} {message}"] = functools.partial(dist.all_reduce, tensor, group=mine)
    return runs


def _model(device: torch.device, sizes: Sizes) -> dict[str, Callable[[], object]]:
    """A microbatch of the model to check the result with."""
    dtype = precision(device)
    ops = choose_ops(OpsConfig(), work=sizes.job.flops(), dtype=dtype, device=device)
    model, _ = build_model(sizes.job, ops, device, dtype)
    tokens = torch.randint(sizes.job.vocab_size, (1, sizes.job.seq_length), device=device)
    return {"microbatch": functools.partial(microbatch, model, tokens)}


def fit_gpus(seconds: Mapping[str, float], place: Place, gpu: Gpu, sizes: Sizes) -> Cluster:
    """Return the cluster for which the planner predicts the measured seconds.

    Peaks are those of the GPU's data sheet if it is in the table, otherwise what was measured.
    """
    launch = seconds["launch"]
    # An operation takes at least half of its time, even where launches are slow.
    seconds = {name: max(value, 2 * launch) if name != "launch" else value for name, value in seconds.items()}
    sheet = of_torch_name(gpu.name)
    moved = {"elementwise": 3 * 2 * sizes.elements, "stream": 3 * 4 * (sizes.elements // 2)}
    speeds = {name: size / (seconds[name] - launch) for name, size in moved.items()}
    if sheet is not None:
        device = dataclasses.replace(device_from_data_sheet(sheet), memory=gpu.memory)
    else:
        peak = 2 * sizes.side**3 / (seconds["product"] - launch)
        device = Device(gpu.name, "bf16", peak, 1, gpu.memory, max(speeds.values()))
    ideal = Efficiency(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, launch)
    unused = Link(1e9, MIN_LATENCY)
    cluster = Cluster(device, place.processes, place.per_node, unused, unused, ideal)
    ideal_product = Kernels(sizes.job, Layout(), cluster, OURS).matmul(*3 * (sizes.side,)) - launch
    scores = sizes.length * (sizes.length + min(sizes.length, ATTENTION_BLOCK)) / 2
    attention = 4 * sizes.heads * scores * sizes.channels / device.peak
    forward, backward = (seconds[f"attention {name}"] - launch for name in ("forward", "backward"))
    link, link_share = _fit_link(
        seconds, "node", place.per_node, sizes, launch, sheet.link / 2 * 1e9 if sheet else None
    )
    node = sheet.node if sheet is not None else None
    network, network_share = _fit_link(
        seconds,
        "network",
        place.processes // place.per_node,
        sizes,
        launch,
        node[1] / node[0] * 1e9 if node else None,
    )
    efficiency = Efficiency(
        matmul=min(1.0, ideal_product / (seconds["product"] - launch)),
        memory=min(1.0, speeds["elementwise"] / device.bandwidth),
        stream=min(1.0, speeds["stream"] / device.bandwidth),
        link=link_share,
        attention=min(1.0, attention / forward),
        network=network_share,
        launch=launch,
        attention_backward=2.5 * forward / backward,
    )
    return dataclasses.replace(cluster, efficiency=efficiency, link=link, network=network)


def _fit_link(
    seconds: Mapping[str, float], name: str, size: int, sizes: Sizes, launch: float, peak: float | None
) -> tuple[Link, float]:
    """The links of a group and the share of their `peak` that is reached, by its all-reduces.

    An all-reduce is a reduce-scatter and an all-gather. Bandwidth is that between the two largest messages; latency
    what is left of the smallest.
    """
    if size < 2:
        return Link(peak or 1e9, 3e-6), 1.0
    times = [seconds[f"{name} {size} {message}"] / 2 for message in sizes.messages]
    sent = [(size - 1) / size * message for message in sizes.messages]
    bandwidth = (sent[-1] - sent[-2]) / max(times[-1] - times[-2], 1e-9)
    latency = (times[0] - launch - sent[0] / bandwidth) / (size - 1)
    share = 1.0 if peak is None else min(1.0, bandwidth / peak)
    return Link(peak or bandwidth, max(latency, MIN_LATENCY)), share


def report(seconds: Mapping[str, float], place: Place, gpu: Gpu, sizes: Sizes, path: Path) -> None:
    """Print what was measured and how far the prediction of a microbatch is from it, and write the file."""
    cluster = fit_gpus(seconds, place, gpu, sizes)
    device, efficiency = cluster.device, cluster.efficiency
    print(f"{place.processes} {gpu.name}, {place.per_node} on a machine; shares of the peaks:")
    for name, share, peak, unit in (
        ("matrix products", efficiency.matmul, device.peak / 1e12, "TFLOP/s"),
        ("attention, forward", efficiency.attention, device.peak / 1e12, "TFLOP/s"),
        (
            "attention, backward",
            efficiency.attention * efficiency.attention_backward,
            device.peak / 1e12,
            "TFLOP/s",
        ),
        ("memory, 16 bits", efficiency.memory, device.bandwidth / 1e9, "GB/s"),
        ("memory, 32 bits", efficiency.stream, device.bandwidth / 1e9, "GB/s"),
    ):
        print(f"  {name:<20} {share:.0%} of {peak:,.4g} {unit}")
    print(f"  {'a launch':<20} {1e6 * efficiency.launch:.2g} us")
    for name, size, _ in place.groups():
        for message in sizes.messages:
            passed = seconds[f"{name} {size} {message}"]
            speed = 2 * (size - 1) / size * message / passed
            print(
                f"  all-reduce of {message / 1e6:,.3g} MB over {size} ({name}): {1e6 * passed:,.3g} us, "
                f"{speed / 1e9:.3g} GB/s on the links"
            )
    one = dataclasses.replace(cluster, devices=1)
    print(checked(seconds["microbatch"], Simulator(sizes.job, Layout(), one, OURS).busiest[1]))
    write_output_file("--calibrate", path, f"# Made by megatron plan --calibrate.\n{describe(cluster)}")
    print(f"{path}: for megatron plan --cluster")
