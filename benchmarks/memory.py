"""Measure the peak memory of a training step on a CPU, relative to the bytes that must exist.

    python benchmarks/memory.py [--size small]

The model is that of `train.py`. torch's profiler reports every allocation and release of the CPU allocator, including
temporaries. This counts tensors, not the resident memory of the process, so every run gives the same numbers. A CPU
without bf16 products measures fp32 alone: in bf16 it has other operations, and a step takes it many minutes.
"""

from __future__ import annotations

import collections
import dataclasses
import gc
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
from parallel import run_metadata
from parallel_steps import memory_trace
from parallel_workers import Workers
from torch import Tensor, nn
from train_sides import SIZES, THREADS, Size, training

from megatron.cli import Parser, add_flags, make_config, run_command
from megatron.flags import Config, flag
from megatron.ops.cpu.attention import BLOCK, MAX_LENGTH
from megatron.ops.cpu.linear import has_onednn
from megatron.reports.profile import annotated
from megatron.training.engine import Engine

ELEMENT_SIZE = {"bf16": 2, "fp32": 4}  # bytes of an activation
OPERATIONS = {
    "fast": "--ops-backend compile",
    "not compiled": "--no-torch-compile",
    "plain": "--ops-backend plain",
}
RECOMPUTED = {
    "nothing": "",
    "layers": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkConfig(Config):
    """Options of the benchmark."""

    size: str = flag("small", "model size", choices=tuple(SIZES))
    output: str = flag(
        str(ROOT / "benchmarks/results/memory.json"), "file to write the results to", metavar="FILE"
    )


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser = Parser(description=__doc__.splitlines()[0])
    add_flags(parser, BenchmarkConfig, "benchmark")
    config = make_config(BenchmarkConfig, vars(parser.parse_args(argv)))
    results = run_metadata("memory.py", argv)
    print(
        "| precision | operations | recomputed | peak MB | must exist MB | ratio |\n|---|---|---|---|---|---|"
    )
    precisions = [name for name in ELEMENT_SIZE if name == "fp32" or has_onednn(torch.bfloat16)]
    for case in itertools.product(precisions, OPERATIONS, RECOMPUTED):
        with Workers(measure, 1, SIZES[config.size], *case, threads=THREADS) as workers:
            (found,) = workers.next()
        results[", ".join(case)] = found
        row = (*case, *(found[key] for key in ("peak MB", "must exist MB", "ratio")))
        print(f"| {' | '.join(map(str, row))} |", flush=True)
        Path(config.output).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def measure(size: Size, precision: str, operations: str, recomputed: str) -> Iterator[dict[str, Any]]:
    flags = f"{OPERATIONS[operations]} {RECOMPUTED[recomputed]}".split()
    with training("cpu", size, precision, *flags) as (engine, step):
        step()  # compiles
        before = live_bytes()
        with annotated(engine.phases):
            trace = memory_trace(step)
        persistent = {
            "weights": [engine.buffer.params],
            "master weights": [] if engine.buffer.is_fp32 else engine.buffer.masters,
            "gradients": [engine.buffer.grads],
            "moments": [piece for pieces in engine.optimizer.state.values() for piece in pieces],
        }
        kinds = {kind: sum(piece.nbytes for piece in pieces) for kind, pieces in persistent.items()}
        kinds["batch and counters"] = before - sum(kinds.values())
        step_bytes, by_operator = find_peak(trace)
        kinds |= step_bytes
        peak = sum(kinds.values())
        required = required_bytes(engine, size, precision, operations, recomputed)
        yield {
            "peak MB": megabytes(peak),
            "must exist MB": megabytes(sum(required.values())),
            "ratio": round(peak / sum(required.values()), 3),
            "at the peak": {kind: megabytes(found) for kind, found in kinds.items()},
            "must exist": {kind: megabytes(found) for kind, found in required.items()},
            "largest of the rest": {
                operator: megabytes(found) for operator, found in by_operator.most_common(6)
            },
        }


def megabytes(size: float) -> float:
    return round(size / 1e6, 1)


def live_bytes() -> int:
    """Return the bytes of all live CPU tensors."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter) and x.device.type == "cpu"]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return sum(storages.values())


def find_peak(events: list[dict]) -> tuple[dict[str, int], collections.Counter[str]]:
    """Find the peak of a step in the profiler's events.

    Returns:
        bytes allocated by the step at its peak: saved by forward for backward, and the rest; and the rest by operator.
    """
    changes = sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"])
    live: dict[int, dict] = {}
    size = largest = 0
    peak: list[dict] = []
    for change in changes:
        size += change["args"]["Bytes"]
        if change["args"]["Bytes"] > 0:
            live[change["args"]["Addr"]] = change
        else:
            live.pop(change["args"]["Addr"], None)
        if size > largest:
            largest, peak = size, list(live.values())
    (backward,) = (e["ts"] for e in events if e.get("name") == "backward-compute")
    kept = sum(e["args"]["Bytes"] for e in peak if e["ts"] < backward)
    operators = [e for e in events if e.get("cat") == "cpu_op"]
    rest = collections.Counter()
    for event in peak:
        if event["ts"] >= backward:
            rest[allocating_operator(operators, event["ts"])] += event["args"]["Bytes"]
    return {"kept for backward": kept, "the rest": largest - kept}, rest


def allocating_operator(operators: list[dict], timestamp: float) -> str:
    """Name the operator that allocated at a timestamp, and the autograd nodes that called it."""
    callers = sorted(
        (e for e in operators if e["ts"] <= timestamp <= e["ts"] + e["dur"]),
        key=lambda e: (e["ts"], -e["dur"]),
    )
    names = [e["name"].removeprefix("autograd::engine::evaluate_function: ") for e in callers]
    names = [name for name in names if not name.startswith("aten::empty")]
    nodes = [name for name in names if "Backward" in name]
    operator = "compiled code" if "CompiledFxGraph" in names[-1] else names[-1]
    return " in ".join(dict.fromkeys([operator, *nodes[::-1]]))


def required_bytes(
    engine: Engine, size: Size, precision: str, operations: str, recomputed: str
) -> dict[str, int]:
    """Bytes of weights, gradients and moments, and the minimum activations that backward needs with these operations.

    For a layer, arXiv 2205.05198 equation 1 has sbh (34 + 5as/h) bytes in 16 bits. This run has no dropout, so the
    masks of dropout between layers (sbh each) and the mask and output of dropout in attention (3as²b of the 5as²b) are
    subtracted. That leaves 16 elements per sbh and one per as²b, the softmax output. Plain attention keeps none of the
    softmax output, and ours keeps the blocks that a query may attend to. The output layer adds the input of the last
    normalization and the gradient of its own input, but no logits, whose gradients forward computes by chunks.

    With full recomputation, the input of every layer must exist, and all activations of one layer (arXiv 2104.04473
    section 3.5).
    """
    element_size, n = ELEMENT_SIZE[precision], engine.buffer.num_elements
    sbh = element_size * size.length * size.batch * size.hidden
    blocks = operations == "fast" and BLOCK <= size.length <= MAX_LENGTH
    seen = (size.length + BLOCK) / 2 / size.length if blocks else 0
    layer = 16 * sbh + int(seen * element_size * size.heads * size.length**2 * size.batch)
    if recomputed == "nothing":
        activations = size.layers * layer + 2 * sbh
    else:
        activations = size.layers * sbh + layer - sbh
    weights = {"weights": 4 * n} if precision == "fp32" else {"weights": 2 * n, "master weights": 4 * n}
    return weights | {"gradients": 4 * n, "moments": 8 * n, "activations": activations}


if __name__ == "__main__":
    run_command(main)
