"""Training steps in one layout: time, bytes communicated and memory allocated."""

from __future__ import annotations

import collections
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from parallel_workers import Workers
from torch import Tensor

import megatron.plugins  # noqa: F401 (registers compiled layers)
from megatron.arguments import parse_run_config
from megatron.data.gpt_dataset import GPTBatch
from megatron.model.flops import flops_per_sample
from megatron.ops.cpu.malloc import keep_freed_memory
from megatron.parallel import collectives
from megatron.parallel.mesh import Mesh, choose_device, init_mesh
from megatron.pretrain_gpt import DEFAULTS, GPT
from megatron.training.build import build_engine
from megatron.training.config import RunConfig

COMMON = """
    --mock-data --tokenizer-type NullTokenizer --train-iters 1 --num-workers 0 --lr 1e-4
    --max-position-embeddings 1024 --distributed-timeout-minutes 3
"""
NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0"
TP, PP = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"

# 16 microbatches keep the bubble of P2 small, and a small vocabulary balances its two stages. Communication of tensor
# parallelism grows with the hidden size, computation with its square.
SPEED = f"""
    {COMMON} {NO_DROPOUT} --device cpu --num-layers 4 --hidden-size 1024 --num-attention-heads 16
    --seq-length 128 --vocab-size 2047 --micro-batch-size 1 --global-batch-size 16
"""
SPEED_LAYOUTS = {"one": (1, ""), "T2": (2, TP), "P2": (2, PP), "D2": (2, "")}

# One sequence, as long as a model of this size needs for context parallelism to be of use.
LONG = f"""
    {COMMON} {NO_DROPOUT} --device cpu --num-layers 4 --hidden-size 512 --num-attention-heads 8
    --seq-length 4096 --max-position-embeddings 4096 --vocab-size 2047 --micro-batch-size 1 --global-batch-size 1
"""
CP = "--context-parallel-size 2 --cp-comm-type"
LONG_LAYOUTS = {
    "one": (1, ""),
    "C2 p2p": (2, f"{CP} p2p"),
    "C2 all_gather": (2, f"{CP} all_gather"),
    "C2 a2a": (2, f"{CP} a2a"),
}

# Every shard is a multiple of the alignment of the flat buffers, so there is no padding.
BYTES = f"""
    {COMMON} {NO_DROPOUT} --device cpu --num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 64
    --vocab-size 1023 --micro-batch-size 2 --global-batch-size 8
"""
BYTES_LAYOUTS = {
    "T2": TP,
    "T2+SP": f"{TP} --sequence-parallel",
    "P2": PP,
    "D2": "",
    "D2+distributed optimizer": "--use-distributed-optimizer",
}

# With dropout, as GPT-3 was trained, attention keeps its whole matrix, which selective recomputation avoids.
MEMORY = f"""
    {COMMON} --device cpu --num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 512
    --vocab-size 2047 --micro-batch-size 2 --global-batch-size 2
"""
FULL = "--recompute-granularity full"
MEMORY_RUNS = {
    "nothing recomputed": (1, ""),
    "selective": (1, "--recompute-activations"),
    "full, uniform, groups of 1": (1, FULL),
    "full, uniform, groups of 2": (1, f"{FULL} --recompute-num-layers 2"),
    "full, block, 4 of 8 layers": (1, f"{FULL} --recompute-method block --recompute-num-layers 4"),
    "T2": (2, TP),
    "T2, full": (2, f"{TP} {FULL}"),
    "T2, full, --distribute-saved-activations": (2, f"{TP} {FULL} --distribute-saved-activations"),
    "T2 with --sequence-parallel": (2, f"{TP} --sequence-parallel"),
    "T2 with --sequence-parallel, selective": (2, f"{TP} --sequence-parallel --recompute-activations"),
}

# 345M parameters, the smallest model of 1909.08053.
GPU = f"""
    {COMMON} --device cuda --bf16 --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024
    --vocab-size 50256 --micro-batch-size 8 --global-batch-size 32 {NO_DROPOUT}
"""
GPU_SAME = f"""
    {COMMON} {NO_DROPOUT} --device cuda --num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128
    --vocab-size 1023 --micro-batch-size 2 --global-batch-size 8 --distributed-backend gloo
"""


class StepRunner:
    """An engine and one global batch."""

    def __init__(self, config: RunConfig, mesh: Mesh) -> None:
        self.config, self.mesh = config, mesh
        self.vocab_size = config.tokenizer.vocab_size + 1  # NullTokenizer adds the end-of-document token
        self.engine = build_engine(
            config,
            GPT,
            mesh,
            vocab_size=self.vocab_size,
            padded_vocab_size=pad_vocab_size(self.vocab_size, mesh),
        )
        self.engine.buffer.initialize(config.training.seed)
        size, micro_batch_size = config.training.global_batch_size, config.training.micro_batch_size
        generator = torch.Generator().manual_seed(0)
        samples = torch.randint(self.vocab_size, (size, config.data.seq_length + 1), generator=generator)
        microbatches = list(samples.split(micro_batch_size))
        self.batches = [self._batch(part) for part in microbatches[mesh.dp.rank :: mesh.dp.size]]

    def _batch(self, samples: Tensor) -> GPTBatch:
        tokens = samples[:, :-1].contiguous()
        return GPTBatch(
            tokens=tokens,
            labels=samples[:, 1:].contiguous(),
            position_ids=torch.arange(tokens.shape[1]).expand_as(tokens),
            loss_mask=torch.ones(tokens.shape),
        )

    def step(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Run one step. The batch is always the same."""
        return self.engine.train_step(
            iter(self.batches),
            num_microbatches=len(self.batches),
            consumed_samples=0,
            lr=1e-4,
            weight_decay=0.1,
        )

    def wait(self) -> None:
        """Synchronize the device, then all processes."""
        if self.mesh.device.type == "cuda":
            torch.cuda.synchronize()
        if self.mesh.world.size > 1:
            dist.barrier()


def pad_vocab_size(vocab_size: int, mesh: Mesh) -> int:
    return -(-vocab_size // (128 * mesh.tp.size)) * 128 * mesh.tp.size


@contextlib.contextmanager
def start_run(flags: str) -> Iterator[StepRunner]:
    """Context with the run that `flags` of pretrain_gpt.py describe."""
    config = parse_run_config(flags.split(), description="", defaults=DEFAULTS)
    if config.training.device == "cpu":
        keep_freed_memory()
    with init_mesh(config.parallel, choose_device(config.training.device)) as mesh:
        yield StepRunner(config, mesh)


def time_steps(flags: str, prepare: Callable[[StepRunner], None] = lambda run: None) -> Iterator[float]:
    """Yield the seconds of each step, between barriers of all processes. `prepare` changes the run before."""
    with start_run(flags) as run:
        prepare(run)
        run.step()
        while True:
            run.wait()
            begin = time.perf_counter()
            run.step()
            run.wait()
            yield time.perf_counter() - begin


def compare_layouts(rounds: int) -> dict[str, object]:
    """Compare one process with two threads with layouts of two single-threaded processes."""
    result = _compare(SPEED, SPEED_LAYOUTS, rounds)
    print("(the bubble of P2 is 1/16, so at best it takes 1.063 if one process uses both cores fully)")
    return result


def compare_context(rounds: int) -> dict[str, object]:
    """Compare one process with two threads with context parallelism over two single-threaded processes."""
    return _compare(LONG, LONG_LAYOUTS, rounds)


def _compare(flags: str, layouts: dict[str, tuple[int, str]], rounds: int) -> dict[str, object]:
    """Compare the layout "one" with the others, whose steps take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in layouts}
    with contextlib.ExitStack() as stack:
        runs = {
            name: stack.enter_context(
                Workers(time_steps, processes, f"{flags} {more}", threads=2 // processes)
            )
            for name, (processes, more) in layouts.items()
        }
        for run in runs.values():
            run.next()
        for _ in range(rounds):
            for name, run in runs.items():
                seconds[name].append(round(run.next()[0], 3))
    ratios = {
        name: round(
            statistics.median(t / one for t, one in zip(seconds[name], seconds["one"], strict=True)), 3
        )
        for name in layouts
        if name != "one"
    }
    for name, ratio in ratios.items():
        print(
            f"{name}: {ratio:.3f} of the time of one process with two threads, {1 / ratio:.3f} of its speed",
            flush=True,
        )
    return {"flags": " ".join(flags.split()), "seconds": seconds, "time / one process": ratios}


def count_bytes(flags: str) -> Iterator[dict[str, int]]:
    """Yield the bytes that this process communicates in a step, by collective.

    An all-gather counts the size of its output, and a reduce-scatter that of its input.
    """
    sent: collections.Counter[str] = collections.Counter()

    def count_calls(kind: str, function, tensor_index: int):
        def call(*args, **kwargs):
            sent[kind] += args[tensor_index].numel() * args[tensor_index].element_size()
            return function(*args, **kwargs)

        return call

    with start_run(flags) as run:
        dist.all_reduce = count_calls("all-reduce", dist.all_reduce, 0)
        dist.isend = count_calls("send", dist.isend, 0)
        collectives._gather = count_calls("all-gather", collectives._gather, 0)
        collectives._reduce_scatter = count_calls("reduce-scatter", collectives._reduce_scatter, 1)
        run.step()
        yield dict(sent)


def expected_bytes(flags: str) -> dict[str, int]:
    """Return the bytes that the formulas of docs/parallelism.md give for a GPT-2 in fp32 on two processes."""
    config = parse_run_config(flags.split(), description="", defaults=DEFAULTS)
    parallel, layers, h = config.parallel, config.model.num_layers, config.model.hidden_size
    b, s = config.training.micro_batch_size, config.data.seq_length
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    m = config.training.global_batch_size // (b * (2 // (tp * pp)))
    vocabulary = config.tokenizer.vocab_size + 1
    sbh, positions = 4 * s * b * h, config.model.max_position_embeddings
    norm = 8  # squared gradient norm, fp64
    if tp > 1:
        cross_entropy = 3 * 4 * s * b
        if not parallel.sequence_parallel:
            return {"all-reduce": m * ((4 * layers + 2) * sbh + cross_entropy) + norm}
        partial = 4 * h * (6 * layers + 2 + positions)
        return {
            "all-reduce": m * cross_entropy + partial + norm,
            "all-gather": m * (6 * layers + 3) * sbh,
            "reduce-scatter": m * (4 * layers + 2) * sbh,
        }
    if pp > 1:
        return {"send": m * sbh, "all-reduce": 4 * vocabulary * h + norm}
    weights = 4 * h * (layers * (12 * h + 13) + vocabulary + positions + 2)
    tokens = 4  # number of tokens, the denominator of the loss
    if parallel.use_distributed_optimizer:
        return {"reduce-scatter": weights, "all-gather": weights, "all-reduce": tokens + norm}
    return {"all-reduce": weights + tokens}


def check_bytes() -> dict[str, dict[str, int]]:
    """Check that the bytes each rank communicates in a step equal the formulas."""
    results = {}
    for name, flags in BYTES_LAYOUTS.items():
        with Workers(count_bytes, 2, f"{BYTES} {flags}") as workers:
            found = workers.next()
        expected = expected_bytes(f"{BYTES} {flags}")
        assert all(rank == expected for rank in found), f"{name}: {found}, expected {expected}"
        results[name] = expected
        print(f"{name}: {expected} bytes per step and rank, equal to the formulas", flush=True)
    return results


def memory_trace(step: Callable[[], object]) -> list[dict]:
    """Return the trace events of torch's profiler for a step, including allocations and releases."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return json.loads(path.read_text())["traceEvents"]


def peak_memory(flags: str) -> Iterator[float]:
    """Yield the peak MB allocated during a step, excluding weights, gradients and optimizer state.

    The profiler reports every allocation and release of torch's CPU allocator, so temporaries and the memory of
    backward count too, in addition to the tensors that autograd saves.
    """
    with start_run(flags) as run:
        run.step()
        run.wait()
        events = memory_trace(run.step)
        changes = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]")
        allocated = peak = 0
        for _, change in changes:
            allocated += change
            peak = max(peak, allocated)
        yield peak / 1e6


def measure_memory() -> dict[str, object]:
    """Measure the peak of a step with each kind of recomputation, the maximum over ranks."""
    peaks = {}
    print("| | MB |\n|---|---|")
    for name, (processes, flags) in MEMORY_RUNS.items():
        with Workers(peak_memory, processes, f"{MEMORY} {flags}") as workers:
            peaks[name] = round(max(workers.next()), 1)
        print(f"| {name} | {peaks[name]:.0f} |", flush=True)
    return {"flags": " ".join(MEMORY.split()), "peak MB": peaks}


def gpu_speed(flags: str) -> Iterator[dict[str, float]]:
    """Yield throughput and memory of one GPU, with the median of ten steps."""
    with start_run(flags) as run:
        for _ in range(3):
            run.step()
        torch.cuda.reset_peak_memory_stats()
        seconds = []
        for _ in range(10):
            run.wait()
            begin = time.perf_counter()
            run.step()
            run.wait()
            seconds.append(time.perf_counter() - begin)
        step, config = statistics.median(seconds), run.config
        samples = config.training.global_batch_size
        flops = samples * flops_per_sample(
            config.model,
            seq_length=config.data.seq_length,
            padded_vocab_size=pad_vocab_size(run.vocab_size, run.mesh),
            num_logits=config.data.seq_length,
        )
        yield {
            "seconds per step": round(step, 4),
            "tokens/s": round(samples * config.data.seq_length / step),
            "TFLOP/s": round(flops / step / 1e12, 1),
            "peak GB": round(torch.cuda.max_memory_allocated() / 1e9, 2),
        }


def train_steps(flags: str) -> Iterator[tuple[float, float]]:
    """Yield this process's share of the loss and the gradient norm after five steps."""
    with start_run(flags) as run:
        for _ in range(5):
            losses, stats = run.step()
        yield losses.sum().item(), stats["grad norm"].item()


def measure_gpu() -> dict[str, object]:
    """Measure one GPU, then check that two processes sharing it over gloo match one process."""
    with Workers(gpu_speed, 1, GPU, threads=2) as workers:
        (speed,) = workers.next()
    print(f"one GPU: {speed}", flush=True)
    found = {}
    for name, (processes, flags) in {"one": (1, ""), "T2": (2, TP), "D2": (2, "")}.items():
        with Workers(train_steps, processes, f"{GPU_SAME} {flags}") as workers:
            ranks = workers.next()
        # Each data-parallel replica has a share of the loss; each tensor-parallel rank has all of it.
        loss = sum(loss for loss, _ in ranks) if name == "D2" else ranks[0][0]
        found[name] = {"loss": loss, "grad norm": ranks[0][1]}
        for quantity, value in found[name].items():
            one = found["one"][quantity]
            assert abs(value - one) <= 1e-4 * one, f"{name}: {quantity} is {value}, one process has {one}"
    print(f"two processes on a shared GPU over gloo match one process: {found}", flush=True)
    return {"flags": " ".join(GPU.split()), "one GPU": speed, "gloo, after 5 steps": found}
