"""What a run's devices can do at most, which its speed is measured against, and how much of their memory it uses."""

from __future__ import annotations

import dataclasses
import functools
import os
import resource
import sys
import time
from pathlib import Path

import torch

from megatron.ops.linear import Matmul
from megatron.parallel.collectives import all_gather, all_reduce_max, all_reduce_sum
from megatron.parallel.mesh import Mesh
from megatron.planner.devices import of_torch_name

# A measurement multiplies matrices of doubling size, up to the largest that can be done in so many seconds in all.
SECONDS = 0.5
SMALLEST, LARGEST = 256, {"cpu": 2048, "cuda": 8192}


@dataclasses.dataclass(frozen=True)
class Peak:
    """FLOP/s of a device in what a run computes in, and in words where that number is from."""

    flops: float
    source: str


def find_peak(mesh: Mesh, product: Matmul, dtype: torch.dtype) -> Peak:
    """The mean peak of the run's devices: what the data sheet says of a known GPU; or what `product`, which the run
    computes with, reaches on a CPU and on a GPU that is not known. Every process must take part."""
    name = torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else ""
    flops, source = known_peak(name, dtype), f"data sheet of {name}"
    if flops is None:
        flops = measured_peak(product, dtype, mesh.device, torch.get_num_threads())
        source = "measured: the fastest of some products of large matrices"
    total = all_reduce_sum(torch.tensor(flops, dtype=torch.float64), mesh.world)
    return Peak(total.item() / mesh.world.size, source)


def known_peak(name: str, dtype: torch.dtype) -> float | None:
    """FLOP/s in `dtype` of the GPU that torch calls `name`; None if it is not in the table, or a part of one (MIG)."""
    sheet = of_torch_name(name)
    if sheet is None:
        return None
    tflops = {torch.float16: sheet.fp16, torch.bfloat16: sheet.bf16, torch.float32: sheet.fp32}[dtype]
    return None if tflops is None else tflops * 1e12


# Runs that follow each other in a process, as in tests, need not wait for it again.
@functools.cache
def measured_peak(product: Matmul, dtype: torch.dtype, device: torch.device, threads: int) -> float:
    """The most FLOP/s of products of square matrices on `threads` threads; takes half a second."""
    best, size, begin = 0.0, SMALLEST, time.perf_counter()
    generator = torch.Generator(device).manual_seed(0)
    while True:
        # Of zeros or ones a GPU makes more, for they take less power.
        x, weight = torch.randn(2, size, size, dtype=dtype, device=device, generator=generator)
        for _ in range(3):  # the first finds its kernel
            seconds = _time(product, x, weight)
            best = max(best, 2 * size**3 / seconds)
        size *= 2
        # The next takes eight times as long, thrice.
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
    """Bytes that this process has "allocated" of a GPU, and the "max allocated" up to now; "reserved" is with what
    torch's allocator holds for later. On a CPU those it has in memory, files that it has mapped among them."""
    if device.type == "cpu":
        # macOS counts bytes, and has no other number.
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        statm = Path("/proc/self/statm")
        now = int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else most
        # Linux notes the most now and then.
        return {"allocated": now, "max allocated": max(most, now)}
    return {
        "allocated": torch.cuda.memory_allocated(device),
        "max allocated": torch.cuda.max_memory_allocated(device),
        "reserved": torch.cuda.memory_reserved(device),
        "max reserved": torch.cuda.max_memory_reserved(device),
    }


def memory_lines(mesh: Mesh, iteration: int) -> str:
    """A line, in NVIDIA's format, for each process of the first replica. Every process must take part."""
    use = memory_use(mesh.device)
    rows = all_gather(torch.tensor([[mesh.dp.rank, *use.values()]]), mesh.world).tolist()
    lines = []
    for rank, (replica, *values) in enumerate(rows):
        if replica == 0:
            told = " | ".join(f"{name}: {n / 2**20:.1f}" for name, n in zip(use, values, strict=True))
            lines.append(f"[Rank {rank}] (after {iteration} iterations) memory (MB) | {told}")
    return "\n".join(lines)


def most_memory(mesh: Mesh) -> dict[str, int]:
    """What the process with the most uses, in bytes by the names of NVIDIA's TensorBoard. Every process must take
    part."""
    use = memory_use(mesh.device)
    most = all_reduce_max(torch.tensor(list(use.values())), mesh.world).tolist()
    names = (f"mem-{name.replace(' ', '-')}-bytes" for name in use)
    return dict(zip(names, most, strict=True))
