"""Measure the CPU of this machine in a minute or two and write a file for `megatron plan --cluster`.

One single-threaded process per core, at least two, measure at the same time, because cores share memory bandwidth. The
efficiencies of matrix products and attention and the launch overhead are fitted to the times of three small models.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from megatron.errors import InputError
from megatron.ops.backend import MIN_COMPILE_FLOPS, Ops, choose_ops
from megatron.ops.config import OpsConfig
from megatron.ops.cpu.malloc import keep_freed_memory
from megatron.optim.config import OptimizerConfig
from megatron.optim.optimizer import Optimizer
from megatron.planner.calibrate_model import VOCAB_SIZE, build_model, checked, make_job, microbatch
from megatron.planner.cluster import Cluster, Device, Efficiency, Link
from megatron.planner.description import describe
from megatron.planner.layout import Layout
from megatron.planner.memory import stage_parameters
from megatron.planner.programs import OURS
from megatron.planner.simulate import OPTIMIZER_BYTES, Simulator
from megatron.preprocessing.workers import available_cores

CPU = torch.device("cpu")
# Measurements alternate in rounds, because a machine's speed may change within a minute; seconds of each per round.
ROUNDS, SECONDS = 8, 0.7
MAX_SPREAD = 1.3  # ratio of the slowest to the fastest round above which a note is printed
MESSAGES = (1 << 14, 1 << 22)  # bytes of the all-reduces
SIDE, COPIED = 1024, 1 << 24  # rows and columns of the square product; elements of the copy
TOKENS, HIDDEN = 128, 1024  # shape for element-wise operations
# Each model's time depends more on its constant than the other models' times do.
JOBS = {
    "matmul": make_job(2, 768, 12, 128),
    "attention": make_job(2, 128, 2, 512),
    "launch": make_job(2, 64, 1, 16),
}
# A larger model, to compare the result with.
CHECKED = make_job(4, 512, 8, 256)
FIT_STEPS = 100  # enough for the constants to converge


def calibrate(path: Path) -> None:
    """Measure this machine, its GPUs if it has some, and write the file.

    Raises:
        InputError: the file cannot be written.
    """
    processes = max(2, available_cores())
    try:
        path.touch()  # fail now rather than after a minute
    except OSError as error:
        raise InputError(f"--calibrate: {path} cannot be written ({error.strerror})") from None
    if torch.cuda.is_available():
        from megatron.planner.calibrate_gpu import calibrate_gpus

        calibrate_gpus(path)
        return
    print(f"measuring with {processes} single-threaded processes for a minute or two", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_measure, args=(processes, folder), nprocs=processes)
        seconds = json.loads((Path(folder) / "seconds").read_text())
    cluster = fit_cluster(seconds, processes)
    one = dataclasses.replace(cluster, devices=1)
    print(checked(seconds["check"], Simulator(CHECKED, Layout(), one, OURS).busiest[1]))
    path.write_text(f"# Made by megatron plan --calibrate.\n{describe(cluster)}", encoding="utf-8")
    print(f"{path}: for megatron plan --cluster")


def fit_cluster(seconds: dict[str, float], processes: int) -> Cluster:
    """Return the cluster for which the planner predicts the measured seconds."""
    copy = 2 * 4 * COPIED / seconds["copy"]
    # The planner's accesses of a norm, an addition and GELU.
    elements = TOKENS * HIDDEN * ((2 + 3 + 3) + 4 * (2 + 3))
    parameters = stage_parameters(JOBS["matmul"], Layout(), 0)
    efficiency = Efficiency(
        matmul=1.0,
        memory=min(1.0, 4 * elements / seconds["elementwise"] / copy),
        stream=min(1.0, OPTIMIZER_BYTES * parameters / seconds["optimizer"] / copy),
        link=1.0,
        attention=1.0,
        network=1.0,
        launch=1e-5,
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / processes
    device = Device("cpu", "fp32", 2 * SIDE**3 / seconds["square"], 1, memory, copy)
    unused = Link(1.0, 0.0)
    cluster = _fit(Cluster(device, processes, processes, unused, unused, efficiency), seconds)
    # A line through a small and a large all-reduce, each of which is a reduce-scatter and an all-gather.
    small, large = ((seconds[f"reduce {size}"] - seconds["before"]) / 2 for size in MESSAGES)
    sent = (processes - 1) / processes
    bandwidth = sent * (MESSAGES[1] - MESSAGES[0]) / max(large - small, 1e-9)
    latency = (small - sent * MESSAGES[0] / bandwidth - cluster.efficiency.launch) / (processes - 1)
    link = Link(bandwidth, max(latency, 1e-7))
    return dataclasses.replace(cluster, link=link, network=link)


def _fit(cluster: Cluster, seconds: dict[str, float]) -> Cluster:
    """Fit the constants that predict the times of `JOBS`: scale each by its model's error, repeatedly."""
    for _ in range(FIT_STEPS):
        for name, job in JOBS.items():
            slower = seconds[name] / Simulator(job, Layout(), cluster, OURS).busiest[1]
            old = getattr(cluster.efficiency, name)
            new = old * slower if name == "launch" else min(1.0, old / slower)
            efficiency = dataclasses.replace(cluster.efficiency, **{name: new})
            cluster = dataclasses.replace(cluster, efficiency=efficiency)
    return cluster


def _measure(rank: int, processes: int, folder: str) -> None:
    """Measure on one process; the first writes the means of all."""
    keep_freed_memory()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    store = dist.FileStore(f"{folder}/store", processes)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=processes)
    ops = choose_ops(OpsConfig(), work=MIN_COMPILE_FLOPS, dtype=torch.float32, device=CPU)
    runs = _memory_and_matmul(ops) | _models(ops) | _communication(ops)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    rounds: list[float] = []  # seconds of the largest model
    for i in range(ROUNDS):
        for name, run in runs.items():
            dist.barrier()
            times = _time(run)
            seconds[name] += times
            if name == "matmul":
                rounds.append(statistics.median(times))
        if rank == 0:
            print(f"  {i + 1} of {ROUNDS} rounds", flush=True)
    if rank == 0 and max(rounds) > MAX_SPREAD * min(rounds):
        print(
            f"note: the slowest round took {max(rounds) / min(rounds):.1f} times as long as the fastest; this machine "
            "is busy with other work, and predictions may be off by as much"
        )
    # Peaks are the fastest measurement, everything else the median.
    typical = [
        (min if name in ("copy", "square") else statistics.median)(times) for name, times in seconds.items()
    ]
    means = torch.tensor(typical, dtype=torch.float64)
    dist.all_reduce(means)
    if rank == 0:
        by_name = dict(zip(runs, (means / processes).tolist(), strict=True))
        (Path(folder) / "seconds").write_text(json.dumps(by_name))
    dist.barrier()
    dist.destroy_process_group()


def _time(run: Callable[[], object]) -> list[float]:
    """Return the seconds of each call, after a warm-up, for about `SECONDS` altogether."""
    begin = time.perf_counter()
    run()
    count = torch.tensor(SECONDS / (time.perf_counter() - begin))
    # Equally many on each process: the calls may communicate.
    dist.all_reduce(count, dist.ReduceOp.MIN)
    times = []
    for _ in range(max(3, int(count))):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return times


def _memory_and_matmul(ops: Ops) -> dict[str, Callable[[], object]]:
    """A copy larger than any cache, element-wise operations, and a product of square matrices."""
    large, other = torch.randn(2, COPIED)
    n, h = TOKENS, HIDDEN
    stream, middle = torch.randn(n, h, requires_grad=True), torch.randn(n, 4 * h, requires_grad=True)
    weight, bias = torch.ones(h, requires_grad=True), torch.zeros(h, requires_grad=True)
    to_stream, to_middle = torch.randn(n, h), torch.randn(n, 4 * h)
    a, b = torch.randn(2, SIDE, SIDE)

    def elementwise() -> None:
        outputs = ops.layer_norm(stream, weight, bias, 1e-5) + to_stream, ops.activation(middle, "gelu_tanh")
        # Not `backward`, which would accumulate into the gradients of the previous call.
        torch.autograd.grad(outputs, (stream, weight, bias, middle), (to_stream, to_middle))

    return {
        "copy": lambda: other.copy_(large),
        "elementwise": elementwise,
        "square": lambda: ops.matmul(a, b, None),
    }


def _models(ops: Ops) -> dict[str, Callable[[], object]]:
    """A microbatch of each of `JOBS`, forward and backward, and an optimizer step of the largest."""
    runs: dict[str, Callable[[], object]] = {}
    for name, job in {**JOBS, "check": CHECKED}.items():
        model, buffer = build_model(job, ops, CPU, torch.float32)
        runs[name] = functools.partial(microbatch, model, torch.randint(VOCAB_SIZE, (1, job.seq_length)))
        if name == "matmul":
            optimizer = Optimizer(buffer, OptimizerConfig(lr=1e-4))
            runs["optimizer"] = functools.partial(optimizer.step, lr=1e-4, weight_decay=0.1)
    return runs


def _communication(ops: Ops) -> dict[str, Callable[[], object]]:
    """All-reduces, each after a matrix product so that waiting for slower processes counts; and that product alone."""
    x, weight = torch.randn(TOKENS, HIDDEN), torch.randn(4 * HIDDEN, HIDDEN)

    def run(message: Tensor | None) -> None:
        ops.matmul(x, weight, None)
        if message is not None:
            dist.all_reduce(message)

    messages = {f"reduce {size}": torch.zeros(size // 4) for size in MESSAGES}
    return {name: functools.partial(run, message) for name, message in {"before": None, **messages}.items()}
