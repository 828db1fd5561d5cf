"""Compare training with sharded gradients and parameters with torch's `fully_shard`, on two processes over gloo.

    python benchmarks/sharding.py [--rounds N] [--size small|tiny] [--output FILE]

The sides train the same model, a GPT of this program in fp32 with its operations, on the same random tokens, with
AdamW and clipping, two microbatches per process and step. They differ in who shards and communicates: `optim_grads`
against `fully_shard` that keeps parameters after forward, and `optim_grads_params` against `fully_shard` that frees
them. Each process has one thread. The steps of all sides alternate; ratios are medians over the rounds. Losses are
those of the steps before the first measured one. Memory and bytes are counted in a step of their own: every allocation
of torch's CPU allocator on top of the tensors that live between steps, and the whole tensors of all-gathers and
reduce-scatters.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import gc
import itertools
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
import torch.distributed as dist
from parallel import run_metadata
from parallel_steps import COMMON, NO_DROPOUT, StepRunner, start_run
from parallel_workers import Workers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from megatron.cli import Parser, add_flags, make_config, run_command
from megatron.flags import Config, flag
from megatron.parallel.parameters import named_parameters

SIZES = {
    "small": "--num-layers 6 --hidden-size 768 --num-attention-heads 12 --seq-length 256 --vocab-size 8191",
    "tiny": "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 127",
}
FLAGS = f"{COMMON} {NO_DROPOUT} --device cpu --micro-batch-size 2 --global-batch-size 8"
OURS = "--data-parallel-sharding-strategy {} --overlap-grad-reduce --overlap-param-gather"
# Sides of a comparison: ours and torch's, which frees parameters after forward or keeps them until backward.
COMPARED = {"optim_grads": ("fully_shard, parameters kept", False)}
COMPARED["optim_grads_params"] = ("fully_shard", True)
LR, WEIGHT_DECAY, LOSSES = 1e-4, 0.1, 4
COLLECTIVES = {"c10d::_allgather_base_": "all-gather", "c10d::_reduce_scatter_base_": "reduce-scatter"}
# Time of a step over that of `fully_shard`, and the largest difference of a loss, relative.
GOAL, SAME = 1.10, 1e-5


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkConfig(Config):
    """Options of the benchmark."""

    rounds: int = flag(7, "measured steps of each side", low=1)
    size: str = flag("small", "size of the model", choices=tuple(SIZES))
    output: str = flag(
        str(ROOT / "benchmarks/results/sharding.json"), "file to write the results to", metavar="FILE"
    )


def our_step(run: StepRunner) -> Tensor:
    """Run a step; returns this rank's share of the loss."""
    return run.step()[0].sum()


def torch_step(run: StepRunner, frees: bool) -> Callable[[], Tensor]:
    """Shard the model of an engine by torch instead; returns a function like `our_step`.

    `frees`: parameters are freed after forward and gathered again in backward.
    """
    (model,), ranks = run.engine.modules, run.mesh.dp.size
    for module in model.modules():
        for name, p in list(named_parameters(module, recurse=False)):
            setattr(module, name, nn.Parameter(p.detach().clone()))
    device_mesh = init_device_mesh("cpu", (ranks,))
    for layer in model.decoder.layers.values():
        fully_shard(layer, mesh=device_mesh, reshard_after_forward=frees)
    fully_shard(model, mesh=device_mesh)  # the root keeps its own parameters until backward
    # As in our groups: no decay of vectors.
    matrices, vectors = (
        [p for p in model.parameters() if (p.dim() >= 2) == is_so] for is_so in (True, False)
    )
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, fused=True)
    batches = run.batches
    del run.engine

    def step() -> Tensor:
        total = torch.zeros(())
        for batch in batches:
            losses = model(batch.tokens, batch.position_ids, labels_bs=batch.labels)
            loss = losses.mean() / len(batches)
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total / ranks

    return step


def measure(flags: str, frees: bool | None) -> Iterator[Any]:
    """Yield the first losses; peak memory and bytes of a step; then the seconds of each step.

    `frees` is that of `torch_step`; None for our side.
    """
    with start_run(flags) as run:
        step = functools.partial(our_step, run) if frees is None else torch_step(run, frees)
        losses = torch.stack([step() for _ in range(LOSSES)]).float()
        dist.all_reduce(losses)
        yield losses.tolist()
        run.wait()
        kept = live_bytes()
        events = step_trace(step)
        yield {"kept": kept, "peak": kept + peak_bytes(events), "bytes": collective_bytes(events)}
        while True:
            run.wait()
            begin = time.perf_counter()
            step()
            run.wait()
            yield time.perf_counter() - begin


def live_bytes() -> int:
    """Bytes of the memory of all tensors."""
    gc.collect()
    found: dict[int, int] = {}
    for x in gc.get_objects():
        if type(x) in (Tensor, nn.Parameter, DTensor) and x.device.type == "cpu":
            storage = getattr(x, "_local_tensor", x).untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def step_trace(step: Callable[[], object]) -> list[dict[str, Any]]:
    """Events of torch's profiler for a step: allocations, releases, and operations with the shapes of their inputs."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, record_shapes=True) as profile:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return json.loads(path.read_text())["traceEvents"]


def peak_bytes(events: list[dict[str, Any]]) -> int:
    """Most bytes that a step has allocated at a time."""
    changes = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]")
    return max(itertools.accumulate(change for _, change in changes))


def collective_bytes(events: list[dict[str, Any]]) -> dict[str, int]:
    """Bytes of the whole fp32 tensors of a step's all-gathers and reduce-scatters."""
    sums: collections.Counter[str] = collections.Counter()
    for event in events:
        if name := COLLECTIVES.get(event.get("name", "")):
            assert "float" in event["args"]["Input type"]
            sums[name] += 4 * max(math.prod(dims) for dims in event["args"]["Input Dims"] if dims)
    return dict(sums)


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser = Parser(description=__doc__.splitlines()[0])
    add_flags(parser, BenchmarkConfig, "benchmark")
    config = make_config(BenchmarkConfig, vars(parser.parse_args(argv)))
    flags = f"{FLAGS} {SIZES[config.size]}"
    sides: dict[str, tuple[str, bool | None]] = {}
    for strategy, (name, frees) in COMPARED.items():
        sides |= {strategy: (f"{flags} {OURS.format(strategy)}", None), name: (flags, frees)}
    results = run_metadata("sharding.py", argv) | {"flags": " ".join(flags.split())}
    with contextlib.ExitStack() as stack:
        runs = {name: stack.enter_context(Workers(measure, 2, *side)) for name, side in sides.items()}
        losses = {name: run.next()[0] for name, run in runs.items()}
        counted = {name: run.next()[0] for name, run in runs.items()}
        rounds = [{name: run.next()[0] for name, run in runs.items()} for _ in range(config.rounds)]
    for name, values in losses.items():
        pairs = zip(values, losses["fully_shard"], strict=True)
        assert all(abs(a - b) <= SAME * b for a, b in pairs), f"{name}: losses {losses}"
    results["sides"] = {
        name: {
            "seconds": round(statistics.median(times[name] for times in rounds), 4),
            "MB kept between steps": round(counted[name]["kept"] / 1e6, 1),
            "MB at the peak": round(counted[name]["peak"] / 1e6, 1),
            "bytes of collectives": counted[name]["bytes"],
            "losses": losses[name],
        }
        for name in runs
    }
    results["ratios"] = {}
    for strategy, (name, _) in COMPARED.items():
        time_ratio = statistics.median(times[strategy] / times[name] for times in rounds)
        memory = counted[strategy]["peak"] / counted[name]["peak"]
        results["ratios"][f"{strategy} / {name}"] = {
            "time": round(time_ratio, 3),
            "goal": GOAL,
            "peak memory": round(memory, 3),
        }
        print(
            f"{strategy} / {name}: time {time_ratio:.3f} (goal {GOAL}), peak memory {memory:.3f}", flush=True
        )
    for name, side in results["sides"].items():
        print(
            f"  {name:30} {side['seconds']:.3f} s, {side['MB at the peak']:.0f} MB, {side['bytes of collectives']}"
        )
    Path(config.output).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run_command(main)
