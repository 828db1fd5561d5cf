"""Bytes at the peak of a step on a CPU over those that must exist, of `train.py`'s model.

    python benchmarks/memory.py [--size small]

Every allocation and release of torch's allocator is counted, as its profiler reports them, temporaries among them. That
counts tensors, not what the system gives the process, and gives the same numbers in every run.
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

from parallel import about
from parallel_steps import memory_trace
from parallel_workers import Workers
from torch import Tensor, nn
from train import SIZES, THREADS, Size, training

from megatron.cli import Parser, add_flags, make_config, run_command
from megatron.flags import Config, flag
from megatron.ops.cpu.attention import BLOCK, MAX_LENGTH
from megatron.ops.linear_cross_entropy import LOGITS_KEPT_BYTES
from megatron.training.engine import Engine

WIDTH = {"bf16": 2, "fp32": 4}  # bytes of an activation
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
    """What to count."""

    size: str = flag("small", "model", choices=tuple(SIZES))
    output: str = flag(str(ROOT / "benchmarks/results/memory.json"), "where results go", metavar="FILE")


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser = Parser(description=__doc__.splitlines()[0])
    add_flags(parser, BenchmarkConfig, "benchmark")
    config = make_config(BenchmarkConfig, vars(parser.parse_args(argv)))
    results = about("memory.py", argv)
    print(
        "| precision | operations | recomputed | peak MB | must exist MB | ratio |\n|---|---|---|---|---|---|"
    )
    for case in itertools.product(WIDTH, OPERATIONS, RECOMPUTED):
        with Workers(measure, 1, SIZES[config.size], *case, threads=THREADS) as workers:
            (found,) = workers.next()
        results[", ".join(case)] = found
        row = (*case, *(found[key] for key in ("peak MB", "must exist MB", "ratio")))
        print(f"| {' | '.join(map(str, row))} |", flush=True)
        Path(config.output).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def measure(size: Size, precision: str, operations: str, recomputed: str) -> Iterator[dict[str, Any]]:
    flags = f"{OPERATIONS[operations]} {RECOMPUTED[recomputed]}".split()
    with training("cpu", size, precision, *flags) as (engine, step):
        step()  # which compiles
        engine.timers.annotates = True
        before = held()
        trace = memory_trace(step)
        stays = {
            "weights": [engine.buffer.params],
            "master weights": [] if engine.buffer.is_fp32 else engine.buffer.masters,
            "gradients": [engine.buffer.grads],
            "moments": [piece for pieces in engine.optimizer.state.values() for piece in pieces],
        }
        kinds = {kind: sum(piece.nbytes for piece in pieces) for kind, pieces in stays.items()}
        kinds["batch and counters"] = before - sum(kinds.values())
        of_step, beside = at_peak(trace)
        kinds |= of_step
        peak = sum(kinds.values())
        wanted = must_exist(engine, size, precision, operations, recomputed)
        yield {
            "peak MB": megabytes(peak),
            "must exist MB": megabytes(sum(wanted.values())),
            "ratio": round(peak / sum(wanted.values()), 3),
            "at the peak": {kind: megabytes(found) for kind, found in kinds.items()},
            "must exist": {kind: megabytes(found) for kind, found in wanted.items()},
            "largest of the rest": {what: megabytes(found) for what, found in beside.most_common(6)},
        }


def megabytes(size: float) -> float:
    return round(size / 1e6, 1)


def held() -> int:
    """Bytes of the tensors that there are."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter) and x.device.type == "cpu"]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return sum(storages.values())


def at_peak(events: list[dict]) -> tuple[dict[str, int], collections.Counter[str]]:
    """Bytes that a step has taken when it holds most: what forward kept for backward, and the rest; and of the rest,
    which operators took it."""
    changes = sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"])
    live: dict[int, dict] = {}
    size = most = 0
    peak: list[dict] = []
    for change in changes:
        size += change["args"]["Bytes"]
        if change["args"]["Bytes"] > 0:
            live[change["args"]["Addr"]] = change
        else:
            live.pop(change["args"]["Addr"], None)
        if size > most:
            most, peak = size, list(live.values())
    (backward,) = (e["ts"] for e in events if e.get("name") == "backward-compute")
    kept = sum(e["args"]["Bytes"] for e in peak if e["ts"] < backward)
    operators = [e for e in events if e.get("cat") == "cpu_op"]
    rest = collections.Counter()
    for event in peak:
        if event["ts"] >= backward:
            rest[taker(operators, event["ts"])] += event["args"]["Bytes"]
    return {"kept for backward": kept, "the rest": most - kept}, rest


def taker(operators: list[dict], moment: float) -> str:
    """The operator that took memory at a moment, and the node of the backward pass that it is of."""
    callers = sorted(
        (e for e in operators if e["ts"] <= moment <= e["ts"] + e["dur"]), key=lambda e: (e["ts"], -e["dur"])
    )
    names = [e["name"].removeprefix("autograd::engine::evaluate_function: ") for e in callers]
    names = [name for name in names if not name.startswith("aten::empty")]
    nodes = [name for name in names if "Backward" in name]
    what = "compiled code" if "CompiledFxGraph" in names[-1] else names[-1]
    return " in ".join(dict.fromkeys([what, *nodes[::-1]]))


def must_exist(
    engine: Engine, size: Size, precision: str, operations: str, recomputed: str
) -> dict[str, int]:
    """Bytes of weights, gradients and moments, and of the least that backward needs with these operations.

    A layer's are those of arXiv 2205.05198 equation 1, sbh (34 + 5as/h) in 16 bits, less what this run has none of: the
    masks of dropout between layers, sbh each, and mask and output of dropout in attention, 3as²b of 5. That leaves 16
    numbers for each of sbh and one for each of as²b, the softmax: of it plain attention keeps none, and ours the blocks
    that a query may see. The output layer adds, as in the same paper, its input, the last normalisation's and the
    logits: plain in fp32, else in the model's precision, up to as many as are kept.

    Recomputed, there are each layer's input and one layer's all (arXiv 2104.04473 section 3.5), or before that the
    logits.
    """
    width, n = WIDTH[precision], engine.buffer.num_elements
    one = width * size.length * size.batch * size.hidden
    blocks = operations == "fast" and BLOCK <= size.length <= MAX_LENGTH
    seen = (size.length + BLOCK) / 2 / size.length if blocks else 0
    layer = 16 * one + int(seen * width * size.heads * size.length**2 * size.batch)
    logits = size.length * size.batch * size.vocab * (4 if operations == "plain" else width)
    output = 2 * one + (logits if operations == "plain" or logits <= LOGITS_KEPT_BYTES else 0)
    if recomputed == "nothing":
        activations = size.layers * layer + output
    else:
        activations = size.layers * one + max(layer - one, output)
    weights = {"weights": 4 * n} if precision == "fp32" else {"weights": 2 * n, "master weights": 4 * n}
    return weights | {"gradients": 4 * n, "moments": 8 * n, "activations": activations}


if __name__ == "__main__":
    run_command(main)
