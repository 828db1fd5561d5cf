"""Peak throughput of the run's devices, and their memory use."""

from __future__ import annotations

import dataclasses
import functools
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from megatron.ops.linear import Matmul
from megatron.parallel.collectives import all_gather, all_reduce_sum, host_max
from megatron.parallel.mesh import Mesh

# Look up FLOP/s of a GPU by torch's name and a dtype; None if unknown. Filled by `megatron.plugins`.
PEAK_FLOPS: list[Callable[[str, torch.dtype], float | None]] = []

# The measurement doubles the matrix size until this many seconds are used up.
SECONDS = 0.5
SMALLEST, LARGEST = 256, {"cpu": 2048, "cuda": 8192}


@dataclasses.dataclass(frozen=True)
class Peak:
    """Peak FLOP/s of a device in the run's precision, and the source of the figure."""

    flops: float
    source: str


def find_peak(mesh: Mesh, product: Matmul, dtype: torch.dtype) -> Peak:
    """Mean peak of the run's devices: from the data sheet of a known GPU, else measured with `product`, the run's
    matrix product. Every process must call it."""
    name = torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else ""
    known = (flops for peak_flops in PEAK_FLOPS if (flops := peak_flops(name, dtype)) is not None)
    flops, source = next(known, None), f"data sheet of {name}"
    if flops is None:
        flops = measured_peak(product, dtype, mesh.device, torch.get_num_threads())
        source = "measured with large matrix products"
    total = all_reduce_sum(torch.tensor(flops, dtype=torch.float64), mesh.world)
    return Peak(total.item() / mesh.world.size, source)


# Cached for processes that run several times, as tests do.
@functools.cache
def measured_peak(product: Matmul, dtype: torch.dtype, device: torch.device, threads: int) -> float:
    """Highest FLOP/s of products of square matrices on `threads` threads. Takes half a second."""
    best, size, begin = 0.0, SMALLEST, time.perf_counter()
    generator = torch.Generator(device).manual_seed(0)
    while True:
        # Random values: with zeros a GPU draws less power and runs faster.
        x, weight = torch.randn(2, size, size, dtype=dtype, device=device, generator=generator)
        for _ in range(3):  # the first selects its kernel
            seconds = _time(product, x, weight)
            best = max(best, 2 * size**3 / seconds)
        size *= 2
        # The next size takes three runs of eight times as long.
        if size > LARGEST[device.type] or time.perf_counter() - begin + 24 * seconds > SECONDS:
            return best


def _time(product: Matmul, x: torch.Tensor, weight: torch.Tensor) -> float:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    begin = time.perf_counter()
    with torch.no_grad():
        product(x, weight, None)
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return time.perf_counter() - begin


def memory_use(device: torch.device) -> dict[str, int]:
    """Memory of this process in bytes: "allocated" and its maximum, and on a GPU also "reserved" by torch's caching
    allocator. On a CPU it is the resident set, which includes mapped files."""
    if device.type == "cpu":
        # macOS gives bytes, and only the maximum.
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        statm = Path("/proc/self/statm")
        now = int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else most
        # Linux updates the maximum only now and then.
        return {"allocated": now, "max allocated": max(most, now)}
    return {
        "allocated": torch.cuda.memory_allocated(device),
        "max allocated": torch.cuda.max_memory_allocated(device),
        "reserved": torch.cuda.memory_reserved(device),
        "max reserved": torch.cuda.max_memory_reserved(device),
    }


def memory_by_rank(mesh: Mesh) -> dict[str, dict[int, float]]:
    """`memory_use` of each rank of the first replica, by name. Every process must call it."""
    use = memory_use(mesh.device)
    rows = all_gather(torch.tensor([[mesh.dp.rank, *use.values()]]), mesh.world).tolist()
    first = {rank: values for rank, (replica, *values) in enumerate(rows) if replica == 0}
    return {name: {rank: values[i] for rank, values in first.items()} for i, name in enumerate(use)}


def memory_lines(use: dict[str, dict[int, float]], iteration: int) -> str:
    """Result of `memory_by_rank` in NVIDIA's format, a line for each rank."""
    lines = []
    for rank in next(iter(use.values())):
        shown = " | ".join(f"{name}: {ranks[rank] / 2**20:.1f}" for name, ranks in use.items())
        lines.append(f"[Rank {rank}] (after {iteration} iterations) memory (MB) | {shown}")
    return "\n".join(lines)


def max_memory(mesh: Mesh) -> dict[str, int]:
    """Memory use of the rank with the most, in bytes by NVIDIA's names in TensorBoard. Every process must call it."""
    use = memory_use(mesh.device)
    most = host_max(list(use.values()), mesh.world)
    names = (f"mem-{name.replace(' ', '-')}-bytes" for name in use)
    return dict(zip(names, most, strict=True))
