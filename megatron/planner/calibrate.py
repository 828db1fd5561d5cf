"""What the CPU of this machine reaches, measured in a minute or two and written as a file for `tools/plan.py
--cluster`.

As many processes of one thread as there are cores, two at least, measure at the same time, for cores share memory.
The constants of products, attention and launches are those with which the planner is right about three small models.
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

from megatron.data.preprocess import cores
from megatron.flags import InputError
from megatron.model.config import ModelConfig
from megatron.model.gpt import GPTModel
from megatron.model.layers import TensorParallel
from megatron.ops.backend import WORTHWHILE, Ops, choose_ops
from megatron.ops.config import OpsConfig
from megatron.ops.memory import keep_freed_memory
from megatron.optim.buffer import ParamBuffer
from megatron.optim.config import OptimizerConfig
from megatron.optim.optimizer import Optimizer
from megatron.parallel.config import ParallelConfig
from megatron.parallel.mesh import Mesh
from megatron.planner.cluster import Cluster, Device, Link, Reached
from megatron.planner.description import describe
from megatron.planner.layout import OURS, Job, Layout
from megatron.planner.memory import stage_parameters
from megatron.planner.simulate import OPTIMIZER_BYTES, Simulator

CPU = torch.device("cpu")
# Of each measurement: they take turns, for a machine's speed may change within a minute.
ROUNDS, SECONDS = 8, 0.7
BUSY = 1.3  # times that the slowest round may take as long as the fastest
MESSAGES = (1 << 14, 1 << 22)  # bytes that are reduced
SIDE, COPIED = 1024, 1 << 24  # rows and columns of a product, and elements that are copied
TOKENS, HIDDEN = 128, 1024  # that operations on elements are measured with
VOCABULARY = 1024


def _job(layers: int, hidden: int, heads: int, length: int) -> Job:
    model = ModelConfig(
        num_layers=layers, hidden_size=hidden, num_attention_heads=heads, max_position_embeddings=length
    )
    return Job(model, length, VOCABULARY, global_batch_size=1)


# By the constant that more of their time depends on than other models' does.
JOBS = {"product": _job(2, 768, 12, 128), "attention": _job(2, 128, 2, 512), "launch": _job(2, 64, 1, 16)}
STEPS = 100  # after which the constants change no more


def calibrate(path: Path) -> None:
    """Measure, and write the file.

    Raises:
        InputError: the file cannot be written.
    """
    processes = max(2, cores())
    try:
        path.touch()  # rather than after a minute
    except OSError as error:
        raise InputError(f"--calibrate: {path} cannot be written ({error.strerror})") from None
    print(f"measuring {processes} processes of one thread for a minute or two", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_measure, args=(processes, folder), nprocs=processes)
        found = json.loads((Path(folder) / "found").read_text())
    cluster = cluster_of(found, processes)
    path.write_text(f"# Made by tools/plan.py --calibrate.\n{describe(cluster)}", encoding="utf-8")
    print(f"{path}: for tools/plan.py --cluster")


def cluster_of(found: dict[str, float], processes: int) -> Cluster:
    """The cluster that explains the seconds that were measured."""
    copy = 2 * 4 * COPIED / found["copy"]
    # As the planner counts moves of a normalisation, an addition and GELU.
    elements = TOKENS * HIDDEN * ((2 + 3 + 3) + 4 * (2 + 3))
    largest = stage_parameters(JOBS["product"], Layout(), 0)
    reached = Reached(
        product=1.0,
        memory=min(1.0, 4 * elements / found["elements"] / copy),
        stream=min(1.0, OPTIMIZER_BYTES * largest / found["optimizer"] / copy),
        link=1.0,
        attention=1.0,
        launch=1e-5,
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / processes
    device = Device("cpu", "fp32", 2 * SIDE**3 / found["square"], 1, memory, copy)
    nothing = Link(1.0, 0.0)
    cluster = _fit(Cluster(device, processes, processes, nothing, nothing, reached), found)
    # A line through a small and a large all-reduce, each of which is a scatter and a gather.
    small, large = ((found[f"reduce {size}"] - found["before"]) / 2 for size in MESSAGES)
    passed = (processes - 1) / processes
    bandwidth = passed * (MESSAGES[1] - MESSAGES[0]) / max(large - small, 1e-9)
    latency = (small - passed * MESSAGES[0] / bandwidth - cluster.reached.launch) / (processes - 1)
    link = Link(bandwidth, max(latency, 1e-7))
    return dataclasses.replace(cluster, link=link, network=link)


def _fit(cluster: Cluster, found: dict[str, float]) -> Cluster:
    """The same with the constants that predict the seconds of the models of `JOBS`: each is changed by as much as its
    model is off, again and again."""
    for _ in range(STEPS):
        for name, job in JOBS.items():
            slower = found[name] / Simulator(job, Layout(), cluster, OURS).busiest[1]
            old = getattr(cluster.reached, name)
            new = old * slower if name == "launch" else min(1.0, old / slower)
            cluster = dataclasses.replace(
                cluster, reached=dataclasses.replace(cluster.reached, **{name: new})
            )
    return cluster


def _measure(rank: int, processes: int, folder: str) -> None:
    """What one process measures; the first writes the means."""
    keep_freed_memory()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    store = dist.FileStore(f"{folder}/store", processes)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=processes)
    ops = choose_ops(OpsConfig(), work=WORTHWHILE, dtype=torch.float32, device=CPU)
    runs = _memory_and_products(ops) | _models(ops) | _communication(ops)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    rounds: list[float] = []  # of the largest model
    for i in range(ROUNDS):
        for name, run in runs.items():
            dist.barrier()
            times = _time(run)
            seconds[name] += times
            if name == "product":
                rounds.append(statistics.median(times))
        if rank == 0:
            print(f"  {i + 1} of {ROUNDS} rounds", flush=True)
    if rank == 0 and max(rounds) > BUSY * min(rounds):
        print(
            f"note: the slowest round took {max(rounds) / min(rounds):.1f} times as long as the fastest; this machine "
            "has other work, and predictions will be as far off"
        )
    # The two that others are shares of are what the machine can do, the others what it does.
    found = [
        (min if name in ("copy", "square") else statistics.median)(times) for name, times in seconds.items()
    ]
    means = torch.tensor(found, dtype=torch.float64)
    dist.all_reduce(means)
    if rank == 0:
        told = dict(zip(runs, (means / processes).tolist(), strict=True))
        (Path(folder) / "found").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


def _time(run: Callable[[], object]) -> list[float]:
    """Seconds of each of as many calls as `SECONDS` have room for by those of the first, which warms up and is not
    among them."""
    begin = time.perf_counter()
    run()
    count = torch.tensor(SECONDS / (time.perf_counter() - begin))
    # As many in each process, for they may communicate.
    dist.all_reduce(count, dist.ReduceOp.MIN)
    times = []
    for _ in range(max(3, int(count))):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return times


def _memory_and_products(ops: Ops) -> dict[str, Callable[[], object]]:
    """A copy of what no cache holds, operations on elements, and the product of square matrices."""
    large, other = torch.randn(2, COPIED)
    n, h = TOKENS, HIDDEN
    stream, middle = torch.randn(n, h, requires_grad=True), torch.randn(n, 4 * h, requires_grad=True)
    weight, bias = torch.ones(h, requires_grad=True), torch.zeros(h, requires_grad=True)
    to_stream, to_middle = torch.randn(n, h), torch.randn(n, 4 * h)
    a, b = torch.randn(2, SIDE, SIDE)

    def elements() -> None:
        outputs = ops.layer_norm(stream, weight, bias, 1e-5) + to_stream, ops.gelu(middle, tanh=True)
        # Not `backward`, which would add to the gradients of the call before.
        torch.autograd.grad(outputs, (stream, weight, bias, middle), (to_stream, to_middle))

    return {
        "copy": lambda: other.copy_(large),
        "elements": elements,
        "square": lambda: ops.matmul(a, b, None),
    }


def _models(ops: Ops) -> dict[str, Callable[[], object]]:
    """A microbatch of each of `JOBS`, forward and backward, and a step of the largest's optimizer."""
    runs: dict[str, Callable[[], object]] = {}
    for name, job in JOBS.items():
        with torch.device("meta"):
            model = GPTModel(
                job.model, vocab_size=VOCABULARY, padded_vocab_size=VOCABULARY, tp=TensorParallel(ops=ops)
            )
        buffer = ParamBuffer([model], Mesh(device=CPU), ParallelConfig(), dtype=torch.float32)
        buffer.initialize(0)
        runs[name] = functools.partial(_microbatch, model, torch.randint(VOCABULARY, (1, job.seq_length)))
        if name == "product":
            optimizer = Optimizer(buffer, OptimizerConfig(lr=1e-4))
            runs["optimizer"] = functools.partial(optimizer.step, lr=1e-4, weight_decay=0.1)
    return runs


def _microbatch(model: GPTModel, tokens: Tensor) -> None:
    positions = torch.arange(tokens.shape[1]).unsqueeze(0)
    model(tokens, positions, labels_bs=tokens).sum().backward()


def _communication(ops: Ops) -> dict[str, Callable[[], object]]:
    """All-reduces after a product, for what each costs is in part to wait for the slower process; and that product."""
    x, weight = torch.randn(TOKENS, HIDDEN), torch.randn(4 * HIDDEN, HIDDEN)

    def run(message: Tensor | None) -> None:
        ops.matmul(x, weight, None)
        if message is not None:
            dist.all_reduce(message)

    messages = {f"reduce {size}": torch.zeros(size // 4) for size in MESSAGES}
    return {name: functools.partial(run, message) for name, message in {"before": None, **messages}.items()}
