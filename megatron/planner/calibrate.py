"""Measure the CPU of this machine in about three minutes and write a file for `megatron plan --cluster`.

One single-threaded process per core, at least two, measure at the same time, because cores share memory bandwidth. The
efficiencies of matrix products, those of experts apart, and of accumulating gradients and the launch overhead are
fitted to the times of seven small models. The kernels of attention are measured alone, for one process and for ring
attention. So are gloo's collectives: its all-gathers and reduce-scatters take as long as its all-reduces. The speed of
a shared machine may change within seconds, so all measurements take turns in cycles of some seconds, and count by their
means.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

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
from megatron.planner.calibrate_attention import attention_kernels, attention_seconds, ring_kernels, with_ring
from megatron.planner.calibrate_model import (
    BESIDE,
    CHECKED,
    JOBS,
    OPTIMIZED,
    VOCAB_SIZE,
    build_model,
    checked,
    forward,
    microbatch,
)
from megatron.planner.cluster import Cluster, Device, Efficiency, Link, Measured
from megatron.planner.description import describe
from megatron.planner.layout import Job, Layout
from megatron.planner.parameters import stage_parameters
from megatron.planner.programs import OURS
from megatron.planner.simulate import OPTIMIZER_BYTES, Simulator
from megatron.tool import write_output_file

CPU = torch.device("cpu")
SECONDS, PROGRESS = 160.0, 20.0  # of a calibration; between lines of its progress
REPEATED = 0.05  # seconds for which a measurement is repeated in a cycle, at least once
COMMUNICATED = 3  # measurements of a collective in a cycle: differences of times, which vary more than these
BLOCK = 4  # collectives in a row, with a forward pass before each
MAX_SPREAD = 1.3  # ratio of the slowest to the fastest quarter of the cycles above which a note is printed
MESSAGES = (1 << 18, 1 << 23)  # bytes of the communication
SIDE, COPIED = 1024, 1 << 24  # rows and columns of the square product; elements of the copy
TOKENS, HIDDEN = 128, 1024  # shape for element-wise operations
PEAKS = ("copy", "square")
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "shift")
FIT_STEPS = 250  # enough for the constants to converge
# Largest ratio of the speeds of products and the square one, of accumulating gradients and the optimizer, and of
# experts' and other products.
MAX_RATIO = 20.0


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
    cluster, check = measure_cpu(processes, torch.float32)
    print(checked(check, microbatch_seconds(CHECKED, dataclasses.replace(cluster, devices=1))))
    write_output_file("--calibrate", path, f"# Made by megatron plan --calibrate.\n{describe(cluster)}")
    print(f"{path}: for megatron plan --cluster")


def measure_cpu(processes: int, dtype: torch.dtype) -> tuple[Cluster, float]:
    """Measure so many single-threaded processes.

    Returns:
        The cluster of these processes, and the seconds of a microbatch of `CHECKED`.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_measure, args=(processes, folder, dtype), nprocs=processes)
        seconds = json.loads((Path(folder) / "seconds").read_text())
    return fit_cluster(seconds, processes, dtype), seconds["check"]


def fit_cluster(seconds: dict[str, float], processes: int, dtype: torch.dtype = torch.float32) -> Cluster:
    """Return the cluster for which the planner predicts the seconds measured in `dtype`."""
    copy = 2 * 4 * COPIED / seconds["copy"]
    # The planner's accesses of a norm, an addition and GELU.
    elements = TOKENS * HIDDEN * ((2 + 3 + 3) + 4 * (2 + 3))
    parameters = stage_parameters(OPTIMIZED, Layout(), 0)
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
    """Fit a line to each collective. An all-reduce is a reduce-scatter and an all-gather of `link`."""
    processes = cluster.devices
    steps, share = (
        processes - 1,
        (processes - 1) / processes,
    )  # of a ring, and of the message that each rank sends
    # By name: all-reduces for which a time counts; steps with latency; share of the message that each rank sends.
    kinds = {
        "all_reduce": (2, steps, share),
        "all_gather": (1, steps, share),
        "reduce_scatter": (1, steps, share),
        "all_to_all": (1, 1, share),
        "send": (1, 1, 1.0),
        "shift": (1, 1, 1.0),
    }
    links = {}
    for name, (parts, latencies, sent) in kinds.items():
        small, large = (seconds[f"{name} {size}"] / parts for size in MESSAGES)
        bandwidth = sent * (MESSAGES[1] - MESSAGES[0]) / max(large - small, 1e-9)
        latency = (small - sent * MESSAGES[0] / bandwidth - cluster.efficiency.launch) / latencies
        links[name] = Link(bandwidth, max(latency, 1e-7))
    link = links.pop("all_reduce")
    return dataclasses.replace(cluster, link=link, network=link, measured=Measured(**links))


def _fit(cluster: Cluster, seconds: dict[str, float]) -> Cluster:
    """Fit the constants that predict the times of `JOBS`: scale each by its models' mean error, repeatedly."""
    for _ in range(FIT_STEPS):
        for name, jobs in JOBS.items():
            errors = (seconds[f"{name} {i}"] / job_seconds(name, job, cluster) for i, job in enumerate(jobs))
            slower = statistics.geometric_mean(errors)
            old = getattr(cluster.efficiency, name)
            new = old * slower if name == "launch" else old / slower
            if name in ("accumulate", "expert"):
                new = max(new, 1 / MAX_RATIO)
            if name != "launch":
                new = min(new, MAX_RATIO)
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


def job_seconds(name: str, job: Job, cluster: Cluster) -> float:
    """Predicted seconds of one of `JOBS`: a microbatch, or one layer's attention alone."""
    if name == "attention":
        return attention_seconds(job, cluster)
    return microbatch_seconds(job, cluster)


def microbatch_seconds(job: Job, cluster: Cluster) -> float:
    """Predicted seconds of a microbatch on one process."""
    return Simulator(job, Layout(), cluster, OURS).busiest[1]


def _measure(rank: int, processes: int, folder: str, dtype: torch.dtype) -> None:
    """Measure on one process; the first writes the means of all cycles."""
    store = dist.FileStore(f"{folder}/store", processes)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=processes)
    found: list[dict[str, float]] = []
    for cycle in cycles(rank, processes, dtype):
        earlier = found[-1]["elapsed"] if found else 0.0
        found.append(cycle)
        if rank == 0 and cycle["elapsed"] // PROGRESS > earlier // PROGRESS:
            print(f"  {cycle['elapsed']:.0f} of about {SECONDS:.0f} s", flush=True)
        if cycle["elapsed"] >= SECONDS:  # the same on all processes
            break
    if rank == 0:
        quarters = _quarters([cycle["check"] for cycle in found])
        if max(quarters) > MAX_SPREAD * min(quarters):
            print(
                f"note: the slowest quarter took {max(quarters) / min(quarters):.1f} times as long as the fastest; "
                "this machine is busy with other work, and predictions may be off by as much"
            )
        (Path(folder) / "seconds").write_text(json.dumps(mean_of(found)))
    dist.barrier()
    dist.destroy_process_group()


def cycles(rank: int, processes: int, dtype: torch.dtype) -> Iterator[dict[str, float]]:
    """Yield the seconds of each measurement once in a cycle of some seconds.

    Processes wait for the slowest. So a computation counts with its seconds there, and a collective with what it adds
    to them. Also the seconds that have passed since the first cycle, as "elapsed". The process group must be there.
    """
    keep_freed_memory()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ops = choose_ops(OpsConfig(), work=MIN_COMPILE_FLOPS, dtype=dtype, device=CPU)
    runs = _memory_and_matmul(ops, dtype) | _models(ops, dtype)
    if processes > 1:
        runs |= _communication(ops, dtype, rank, processes)
    times = {}
    for name, run in runs.items():
        run()  # allocates and compiles
        count = torch.tensor(COMMUNICATED if _communicates(name) else REPEATED / run())
        dist.all_reduce(count, dist.ReduceOp.MIN)
        times[name] = max(1, int(count))
    begin = time.perf_counter()
    while True:
        seconds = []
        for name, run in runs.items():
            dist.barrier()
            seconds.append(statistics.mean(run() for _ in range(times[name])))
        names = (*runs, "elapsed")
        signs = torch.tensor([-1.0 if _communicates(name) else 1.0 for name in names], dtype=torch.float64)
        slowest = signs * torch.tensor([*seconds, time.perf_counter() - begin], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        yield dict(zip(names, (signs * slowest).tolist(), strict=True))


def mean_of(found: Sequence[dict[str, float]]) -> dict[str, float]:
    """The seconds that count of all cycles: of a peak the fastest, of everything else the mean."""
    return {
        name: (min if name in PEAKS else statistics.mean)([cycle[name] for cycle in found])
        for name in found[0]
    }


def _quarters(seconds: Sequence[float]) -> list[float]:
    """Means of the quarters of a series."""
    size = -(-len(seconds) // 4)
    return [statistics.mean(seconds[i : i + size]) for i in range(0, len(seconds), size)]


def _communicates(name: str) -> bool:
    """True for a measurement of a collective."""
    return name.split()[0] in COLLECTIVES


def _timed(run: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def _timed_again(run: Callable[[], object]) -> float:
    """Return the seconds of a second call, which finds in the caches what the first one left."""
    run()
    return _timed(run)


def _timed_between(beside: Callable[[], object], communicate: Callable[[], object]) -> float:
    """Return the seconds that a collective adds to the computation between collectives.

    Its own time includes the wait for a slower process, and its data displace those of the computation in the caches.
    """

    def passes(after: Callable[[], object]) -> None:
        for _ in range(BLOCK):
            beside()
            after()

    seconds = _timed(lambda: passes(communicate))
    beside()  # fills the caches
    return (seconds - _timed(lambda: passes(lambda: None))) / BLOCK


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
    """A microbatch of each of `JOBS`, forward and backward, and an optimizer step of one."""
    runs: dict[str, Callable[[], float]] = {}
    models = {f"{name} {i}": job for name, jobs in JOBS.items() for i, job in enumerate(jobs)}
    for name, job in {**models, "check": CHECKED}.items():
        if name.startswith("attention"):
            runs[name] = functools.partial(_timed_again, attention_kernels(job, ops, dtype))
            continue
        model, buffer = build_model(job, ops, CPU, dtype)
        tokens = torch.randint(VOCAB_SIZE, (1, job.seq_length))
        runs[name] = functools.partial(_timed_again, functools.partial(microbatch, model, tokens))
        if job is OPTIMIZED:
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
