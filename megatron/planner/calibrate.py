"""What the CPU of this machine reaches, measured in about a minute and written as a file for `tools/plan.py
--cluster`.

As many processes of one thread as there are cores, two at least, measure at the same time, for cores share memory.
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron.flags import InputError
from megatron.ops.backend import WORTHWHILE, Ops, choose_ops
from megatron.ops.config import OpsConfig
from megatron.planner.cluster import Cluster, Device, Link, Reached
from megatron.planner.description import describe

SECONDS = 0.7  # of each measurement
TOKENS, HIDDEN = (128, 512), (512, 1024)  # of products
HEADS, WIDTH = 16, 64
MESSAGES = (1 << 14, 1 << 22)  # bytes that are reduced
CPU = torch.device("cpu")


def calibrate(path: Path) -> None:
    """Measure, and write the file.

    Raises:
        InputError: the file cannot be written.
    """
    processes = max(2, len(os.sched_getaffinity(0)))
    try:
        path.touch()  # rather than after a minute
    except OSError as error:
        raise InputError(f"--calibrate: {path} cannot be written ({error.strerror})") from None
    print(f"measuring {processes} processes of one thread for about a minute", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_measure, args=(processes, folder), nprocs=processes)
        found = json.loads((Path(folder) / "found").read_text())
    cluster = _cluster(found, processes)
    path.write_text(f"# Made by tools/plan.py --calibrate.\n{describe(cluster)}", encoding="utf-8")
    print(f"{path}: for tools/plan.py --cluster")


def _cluster(found: dict[str, float], processes: int) -> Cluster:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / processes
    link = Link(found["reduce bandwidth"], found["reduce latency"])
    return Cluster(
        device=Device("cpu", "fp32", found["peak"], 1, memory, found["copy"]),
        devices=processes,
        per_node=processes,
        link=link,
        network=link,
        reached=Reached(
            product=min(1.0, found["products"] / found["peak"]),
            memory=min(1.0, found["elements"] / found["copy"]),
            stream=1.0,
            link=1.0,
            attention=min(1.0, found["attention"] / found["peak"]),
            launch=found["launch"],
        ),
    )


def _measure(rank: int, processes: int, folder: str) -> None:
    """What one process measures; the first writes the means."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    store = dist.FileStore(f"{folder}/store", processes)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=processes)
    ops = choose_ops(OpsConfig(), work=WORTHWHILE, dtype=torch.float32, device=CPU)
    found: dict[str, float] = {}
    for name, measure in (
        ("products", lambda: _products(ops)),
        ("memory", lambda: _memory(ops)),
        ("attention", lambda: {"attention": _attention(ops)}),
        ("communication", lambda: _communication(processes)),
    ):
        dist.barrier()
        found |= measure()
        if rank == 0:
            print(f"  {name}", flush=True)
    means = torch.tensor(list(found.values()), dtype=torch.float64)
    dist.all_reduce(means)
    if rank == 0:
        told = dict(zip(found, (means / processes).tolist(), strict=True))
        (Path(folder) / "found").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


def _time(run: Callable[[], object], *, rounds: int | None = None) -> float:
    """Seconds of the fastest call, of those in `SECONDS` or of so many rounds: other work on the machine only
    slows. The first calls warm up."""
    for _ in range(3):
        run()
    times: list[float] = []
    end = time.perf_counter() + SECONDS
    while len(times) < rounds if rounds else time.perf_counter() < end:
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times)


def _products(ops: Ops) -> dict[str, float]:
    """FLOP/s of a linear layer's three products: the best of the sizes, and that of all together."""
    rates, work, seconds = [], 0.0, 0.0
    for n in TOKENS:
        for h in HIDDEN:
            x, weight, grad = torch.randn(n, h), torch.randn(4 * h, h), torch.randn(n, 4 * h)
            for a, b in ((x, weight), (grad, weight.t()), (grad.t(), x.t())):
                flops, took = 2 * n * h * 4 * h, _time(lambda a=a, b=b: ops.matmul(a, b, None))
                rates.append(flops / took)
                work, seconds = work + flops, seconds + took
    return {"peak": max(rates), "products": work / seconds}


def _memory(ops: Ops) -> dict[str, float]:
    """Bytes/s of copying what no cache holds, and of operations on elements as the planner counts their moves; and
    the seconds of an operation on next to nothing."""
    large, other = torch.randn(2, 1 << 24)
    copy = 2 * 4 * large.numel() / _time(lambda: other.copy_(large))
    n, h = TOKENS[0], HIDDEN[-1]
    stream, middle = torch.randn(n, h, requires_grad=True), torch.randn(n, 4 * h, requires_grad=True)
    weight, bias = torch.ones(h, requires_grad=True), torch.zeros(h, requires_grad=True)
    to_stream, to_middle = torch.randn(n, h), torch.randn(n, 4 * h)

    def elements() -> None:
        outputs = ops.layer_norm(stream, weight, bias, 1e-5) + to_stream, ops.gelu(middle, tanh=True)
        # Not `backward`, which would add to the gradients of the call before.
        torch.autograd.grad(outputs, (stream, weight, bias, middle), (to_stream, to_middle))

    moves = n * h * (2 + 3 + 3) + 4 * n * h * (2 + 3)
    tiny = torch.ones(16, requires_grad=True)
    launch = _time(lambda: (tiny + tiny).backward(tiny)) / 2
    return {"copy": copy, "elements": 4 * moves / _time(elements), "launch": launch}


def _attention(ops: Ops) -> float:
    """FLOP/s forward and backward under a causal mask, as `Kernels.attention` counts them."""
    work = seconds = 0.0
    for s in TOKENS:
        q, k, v = (torch.randn(1, HEADS, s, WIDTH, requires_grad=True) for _ in range(3))
        grad = torch.randn(1, HEADS, s, WIDTH)
        seconds += _time(
            lambda q=q, k=k, v=v, grad=grad: torch.autograd.grad(
                ops.attention(q, k, v, mask_bst=None, causal=True, dropout=0.0), (q, k, v), grad
            )
        )
        work += 3.5 * 2 * HEADS * s * s * WIDTH
    return work / seconds


def _communication(processes: int) -> dict[str, float]:
    """A line through the seconds of a small and a large all-reduce: bytes/s of a link, and seconds of a ring's
    step."""
    small, large = (
        _time(functools.partial(dist.all_reduce, torch.zeros(n // 4)), rounds=40) for n in MESSAGES
    )
    passed = 2 * (processes - 1) / processes
    bandwidth = passed * (MESSAGES[1] - MESSAGES[0]) / max(large - small, 1e-9)
    latency = (small - passed * MESSAGES[0] / bandwidth) / (2 * (processes - 1))
    return {"reduce bandwidth": bandwidth, "reduce latency": max(latency, 1e-7)}
