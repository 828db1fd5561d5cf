"""Measure the CPU of this machine in about three minutes and write a file for `megatron plan --cluster`.

One single-threaded process per core, at least two, measure at the same time, because cores share memory bandwidth. The
efficiencies of matrix products, those of experts apart, of attention and of accumulating gradients and the launch
overhead are fitted to the times of five small models. gloo's collectives are measured one by one: its all-gathers and
reduce-scatters take as long as its all-reduces. So are the kernels of ring attention, which are others than those of
one process. A collective counts by its mean: of its messages some wait for the next tick of the system's scheduler, and
a step has hundreds.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from megatron.cores import available_cores
from megatron.errors import InputError
from megatron.ops.backend import MIN_COMPILE_FLOPS, Ops, choose_ops
from megatron.ops.config import OpsConfig
from megatron.ops.cpu.malloc import keep_freed_memory
from megatron.optim.config import OptimizerConfig
from megatron.optim.optimizer import Optimizer
from megatron.parallel.collectives import (
    all_gather,
    all_reduce_sum,
    start_all_to_all,
    start_reduce_scatter,
    start_shift,
)
from megatron.parallel.mesh import Axis
from megatron.planner.calibrate_context import ring_kernels, with_ring
from megatron.planner.calibrate_model import VOCAB_SIZE, build_model, checked, forward, make_job, microbatch
from megatron.planner.cluster import Cluster, Device, Efficiency, Link
from megatron.planner.description import describe
from megatron.planner.layout import Layout
from megatron.planner.parameters import stage_parameters
from megatron.planner.programs import OURS
from megatron.planner.simulate import OPTIMIZER_BYTES, Simulator
from megatron.tool import write_output_file

CPU = torch.device("cpu")
# Measurements alternate in rounds, because a machine's speed may change within a minute; seconds of each per round,
# and of each communication.
ROUNDS, SECONDS, COMMUNICATION_SECONDS = 8, 0.7, 0.8
MAX_SPREAD = 1.3  # ratio of the slowest to the fastest round above which a note is printed
MESSAGES = (1 << 18, 1 << 23)  # bytes of the communication
SIDE, COPIED = 1024, 1 << 24  # rows and columns of the square product; elements of the copy
TOKENS, HIDDEN = 128, 1024  # shape for element-wise operations
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "shift")
MIXTURE: dict[str, Any] = {
    "add_bias_linear": False,
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 2048,
    "moe_grouped_gemm": True,
}
# Each model's time depends more on its constant than the other models' times do.
JOBS = {
    "matmul": make_job(2, 768, 12, 256),
    "accumulate": make_job(2, 768, 12, 64),
    "attention": make_job(2, 128, 2, 512),
    "launch": make_job(2, 64, 1, 16),
    "expert": make_job(1, 768, 12, 256, **MIXTURE),
}
# Forward passes of this model run between measured collectives. One takes some milliseconds, as does the computation
# between two collectives of a model that is trained on CPUs.
BESIDE = make_job(1, 512, 8, 64)
# A larger model, to compare the result with.
CHECKED = make_job(4, 512, 8, 256)
FIT_STEPS = 250  # enough for the constants to converge
MAX_RATIO = 20.0  # of speeds: accumulating gradients and the optimizer, experts' and other products


def calibrate(path: Path) -> None:
    """Measure this machine, its GPUs if it has some, and write the file.

    Raises:
        InputError: the file cannot be written.
    """
    processes = max(2, available_cores())
    # Fail before measuring. A new file is written beside its place and moved there.
    place = path if path.exists() and not path.is_file() else path.resolve().parent
    if not os.access(place, os.W_OK):
        raise InputError(f"--calibrate: {path} cannot be written (no permission to write {place})")
    if torch.cuda.is_available():
        from megatron.planner.calibrate_gpu import calibrate_gpus

        calibrate_gpus(path)
        return
    print(f"measuring with {processes} single-threaded processes for about three minutes", flush=True)
    cluster, check = measure_cpu(processes, torch.float32, rounds=ROUNDS, verbose=True)
    one = dataclasses.replace(cluster, devices=1)
    print(checked(check, Simulator(CHECKED, Layout(), one, OURS).busiest[1]))
    write_output_file("--calibrate", path, f"# Made by megatron plan --calibrate.\n{describe(cluster)}")
    print(f"{path}: for megatron plan --cluster")


def measure_cpu(
    processes: int, dtype: torch.dtype, *, rounds: int, verbose: bool = False
) -> tuple[Cluster, float]:
    """Measure so many single-threaded processes, for about 17 seconds a round.

    Returns:
        The cluster of these processes, and the seconds of a microbatch of `CHECKED`.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_measure, args=(processes, folder, dtype, rounds, verbose), nprocs=processes)
        seconds = json.loads((Path(folder) / "seconds").read_text())
    return fit_cluster(seconds, processes, dtype), seconds["check"]


def fit_cluster(seconds: dict[str, float], processes: int, dtype: torch.dtype = torch.float32) -> Cluster:
    """Return the cluster for which the planner predicts the seconds measured in `dtype`."""
    copy = 2 * 4 * COPIED / seconds["copy"]
    # The planner's accesses of a norm, an addition and GELU.
    elements = TOKENS * HIDDEN * ((2 + 3 + 3) + 4 * (2 + 3))
    parameters = stage_parameters(JOBS["matmul"], Layout(), 0)
    # In bf16 the optimizer also writes the parameters from their master weights.
    optimizer_bytes = OPTIMIZER_BYTES + (2 if dtype == torch.bfloat16 else 0)
    efficiency = Efficiency(
        matmul=1.0,
        memory=min(1.0, dtype.itemsize * elements / seconds["elementwise"] / copy),
        stream=min(1.0, optimizer_bytes * parameters / seconds["optimizer"] / copy),
        link=1.0,
        attention=1.0,
        network=1.0,
        launch=1e-5,
        # Each core computes and communicates.
        beside=1.0,
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / processes
    precision = "bf16" if dtype == torch.bfloat16 else "fp32"
    device = Device("cpu", precision, 2 * SIDE**3 / seconds["square"], 1, memory, copy)
    unused = Link(1.0, 0.0)
    cluster = _fit(Cluster(device, processes, processes, unused, unused, efficiency), seconds)
    if processes == 1:
        return cluster
    return with_ring(_with_communication(cluster, seconds), seconds["ring"])


def _with_communication(cluster: Cluster, seconds: dict[str, float]) -> Cluster:
    """Fit a line to the all-reduces, each of which is a reduce-scatter and an all-gather, and compare the others."""
    processes = cluster.devices
    taken = {name: [max(seconds[f"{name} {size}"], 1e-7) for size in MESSAGES] for name in COLLECTIVES}
    small, large = (time / 2 for time in taken["all_reduce"])
    sent = (processes - 1) / processes
    bandwidth = sent * (MESSAGES[1] - MESSAGES[0]) / max(large - small, 1e-9)
    latency = (small - sent * MESSAGES[0] / bandwidth - cluster.efficiency.launch) / (processes - 1)
    link = Link(bandwidth, max(latency, 1e-7))
    cluster = dataclasses.replace(cluster, link=link, network=link)
    everyone, pair = cluster.group(processes, 1), cluster.group(2, 1)
    ratios = {}
    for name in COLLECTIVES[1:]:
        formula = getattr(cluster, name)
        group = pair if name == "send" else everyone
        times = (formula(size, group) / t for size, t in zip(MESSAGES, taken[name], strict=True))
        ratios[name] = math.sqrt(math.prod(times))
    return dataclasses.replace(cluster, efficiency=dataclasses.replace(cluster.efficiency, **ratios))


def _fit(cluster: Cluster, seconds: dict[str, float]) -> Cluster:
    """Fit the constants that predict the times of `JOBS`: scale each by its model's error, repeatedly."""
    for _ in range(FIT_STEPS):
        for name, job in JOBS.items():
            slower = seconds[name] / Simulator(job, Layout(), cluster, OURS).busiest[1]
            old = getattr(cluster.efficiency, name)
            new = old * slower if name == "launch" else old / slower
            if name in ("accumulate", "expert"):
                new = min(max(new, 1 / MAX_RATIO), MAX_RATIO)
            efficiency = dataclasses.replace(cluster.efficiency, **{name: new})
            cluster = dataclasses.replace(cluster, efficiency=efficiency)
    # Products of a model may be faster than the square one: then these have the peak.
    device, efficiency = cluster.device, cluster.efficiency
    faster = max(1.0, efficiency.matmul, efficiency.attention)
    return dataclasses.replace(
        cluster,
        device=dataclasses.replace(device, peak=device.peak * faster),
        efficiency=dataclasses.replace(
            efficiency, matmul=efficiency.matmul / faster, attention=efficiency.attention / faster
        ),
    )


def _measure(rank: int, processes: int, folder: str, dtype: torch.dtype, rounds: int, verbose: bool) -> None:
    """Measure on one process; the first writes the means of all."""
    keep_freed_memory()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    store = dist.FileStore(f"{folder}/store", processes)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=processes)
    ops = choose_ops(OpsConfig(), work=MIN_COMPILE_FLOPS, dtype=dtype, device=CPU)
    runs = _memory_and_matmul(ops, dtype) | _models(ops, dtype)
    if processes > 1:
        runs |= _communication(ops, dtype, rank, processes)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    largest: list[float] = []  # seconds of the largest model, by round
    for i in range(rounds):
        for name, run in runs.items():
            dist.barrier()
            times = _repeat(run, COMMUNICATION_SECONDS if _communicates(name) else SECONDS)
            seconds[name] += times
            if name == "matmul":
                largest.append(statistics.median(times))
        if rank == 0 and verbose:
            print(f"  {i + 1} of {rounds} rounds", flush=True)
    if rank == 0 and max(largest) > MAX_SPREAD * min(largest):
        print(
            f"note: the slowest round took {max(largest) / min(largest):.1f} times as long as the fastest; this "
            "machine is busy with other work, and predictions may be off by as much"
        )
    typical = [_typical(name, times) for name, times in seconds.items()]
    means = torch.tensor(typical, dtype=torch.float64)
    dist.all_reduce(means)
    if rank == 0:
        by_name = dict(zip(runs, (means / processes).tolist(), strict=True))
        (Path(folder) / "seconds").write_text(json.dumps(by_name))
    dist.barrier()
    dist.destroy_process_group()


def _communicates(name: str) -> bool:
    """True for a measurement of a collective."""
    return name.split()[0] in COLLECTIVES


def _typical(name: str, times: list[float]) -> float:
    """The seconds that count: of a peak the fastest, of communication the mean, of everything else the median."""
    if name in ("copy", "square"):
        return min(times)
    return (statistics.mean if _communicates(name) else statistics.median)(times)


def _repeat(run: Callable[[], float], seconds: float) -> list[float]:
    """Call `run` for about `seconds` in total, after a warm-up, and return its results."""
    begin = time.perf_counter()
    run()
    count = torch.tensor(seconds / (time.perf_counter() - begin))
    # Equally many on each process: the calls may communicate.
    dist.all_reduce(count, dist.ReduceOp.MIN)
    return [run() for _ in range(max(3, int(count)))]


def _timed(run: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def _timed_between(beside: Callable[[], object], communicate: Callable[[], object]) -> float:
    """Return the seconds of a collective plus the slowdown of the computation after it.

    The slowdown is the time of that computation minus the time of its repetition: data have left the caches. Waiting
    for a slower process is in the collective's own time.
    """
    return _timed(communicate) + _timed(beside) - _timed(beside)


def _memory_and_matmul(ops: Ops, dtype: torch.dtype) -> dict[str, Callable[[], float]]:
    """A copy larger than any cache, element-wise operations, and a product of square matrices."""
    large, other = torch.randn(2, COPIED)
    n, h = TOKENS, HIDDEN
    make = functools.partial(torch.randn, dtype=dtype)
    stream, middle = make(n, h, requires_grad=True), make(n, 4 * h, requires_grad=True)
    weight = torch.ones(h, dtype=dtype, requires_grad=True)
    bias = torch.zeros(h, dtype=dtype, requires_grad=True)
    to_stream, to_middle = make(n, h), make(n, 4 * h)
    a, b = make(2, SIDE, SIDE)

    def elementwise() -> None:
        outputs = ops.layer_norm(stream, weight, bias, 1e-5) + to_stream, ops.activation(middle, "gelu_tanh")
        # Not `backward`, which would accumulate into the gradients of the previous call.
        torch.autograd.grad(outputs, (stream, weight, bias, middle), (to_stream, to_middle))

    return {
        "copy": functools.partial(_timed, lambda: other.copy_(large)),
        "elementwise": functools.partial(_timed, elementwise),
        "square": functools.partial(_timed, lambda: ops.matmul(a, b, None)),
    }


def _models(ops: Ops, dtype: torch.dtype) -> dict[str, Callable[[], float]]:
    """A microbatch of each of `JOBS`, forward and backward, and an optimizer step of the largest."""
    runs: dict[str, Callable[[], float]] = {}
    for name, job in {**JOBS, "check": CHECKED}.items():
        model, buffer = build_model(job, ops, CPU, dtype)
        tokens = torch.randint(VOCAB_SIZE, (1, job.seq_length))
        runs[name] = functools.partial(_timed, functools.partial(microbatch, model, tokens))
        if name == "matmul":
            optimizer = Optimizer(buffer, OptimizerConfig(lr=1e-4))
            step = functools.partial(optimizer.step, lr=1e-4, weight_decay=0.1)
            runs["optimizer"] = functools.partial(_timed, step)
    return runs


def _communication(ops: Ops, dtype: torch.dtype, rank: int, processes: int) -> dict[str, Callable[[], float]]:
    """Each of `COLLECTIVES` between forward passes of `BESIDE`.

    Also the kernels of ring attention, whose inputs are not in the caches after such a pass.
    """
    model, _ = build_model(BESIDE, ops, CPU, dtype)
    tokens, axis = torch.randint(VOCAB_SIZE, (1, BESIDE.seq_length)), Axis(rank, processes)
    beside = torch.no_grad()(functools.partial(forward, model, tokens))
    ring = ring_kernels(dtype, processes)

    def ring_after_a_pass() -> float:
        beside()
        return _timed(ring)

    runs = {"ring": ring_after_a_pass}
    for size in MESSAGES:
        rows = torch.zeros(processes, size // dtype.itemsize // processes, dtype=dtype)
        for name in COLLECTIVES:
            collective = functools.partial(_communicate, name, rows, axis)
            runs[f"{name} {size}"] = functools.partial(_timed_between, beside, collective)
    return runs


def _communicate(name: str, rows: Tensor, axis: Axis) -> None:
    """Run one of `COLLECTIVES` over [processes, n]. Transfers go from each even rank to the next."""
    if name == "all_reduce":
        all_reduce_sum(rows, axis)
    elif name == "all_gather":
        all_gather(rows[:1], axis)
    elif name == "reduce_scatter":
        start_reduce_scatter(rows, axis).wait()
    elif name == "all_to_all":
        start_all_to_all(rows, axis, [1] * axis.size, [1] * axis.size).wait()
    elif name == "shift":
        start_shift(rows, axis).wait()
    elif axis.rank % 2:
        dist.recv(rows, axis.rank - 1)
    elif axis.rank + 1 < axis.size:
        dist.send(rows, axis.rank + 1)
