"""Measure the cost of parallel layouts on this machine: time, bytes communicated and memory.

    python benchmarks/parallel.py [--only layouts|context|schedules|stages|search|validation|bytes|memory|gpu ...]

layouts: one process with two threads against tensor, pipeline and data parallelism over two single-threaded processes.
context: the same with context parallelism, for one sequence of 4,096 tokens.
schedules: pipeline bubbles with simulated stages, against theory and torch.distributed.pipelining.
stages: even pipeline stages against those of --pipeline-model-parallel-layout auto, also simulated.
search: the lists of --pipeline-schedule auto against schedules with a name, in the simulator.
validation: steps with --enable-optimizer-post-validation and without, whose passes sleep.
bytes: bytes that each process communicates in a step, which must equal the formulas of docs/parallelism.md.
memory: peak memory of a step with each kind of activation recomputation.
gpu: a 345M model on one GPU; two processes that share the GPU over gloo must match one process.

All sides of a comparison take turns in processes that stay alive, so they run under the same load of the machine.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from parallel_schedules import compare_schedules, compare_stages
from parallel_search import compare_search
from parallel_steps import check_bytes, compare_context, compare_layouts, measure_gpu, measure_memory
from parallel_validation import compare_post_validation

from megatron.cli import Parser, add_flags, make_config, run_command
from megatron.errors import InputError
from megatron.flags import Config, flag

PARTS = ("layouts", "context", "schedules", "stages", "search", "validation", "bytes", "memory", "gpu")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkConfig(Config):
    """Options of the benchmark."""

    only: tuple[str, ...] | None = flag(
        None, "parts to measure (default: all, gpu only if there is one)", choices=PARTS, nargs="+"
    )
    rounds: int = flag(5, "measured rounds", low=1)
    output: str = flag(
        str(ROOT / "benchmarks/results/parallel.json"),
        "file to write the results to; parts that are not measured keep their results",
        metavar="FILE",
    )


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser = Parser(description=__doc__.splitlines()[0])
    add_flags(parser, BenchmarkConfig, "benchmark")
    config = make_config(BenchmarkConfig, vars(parser.parse_args(argv)))
    has_gpu = torch.cuda.is_available()
    parts = config.only or PARTS[: None if has_gpu else -1]
    if "gpu" in parts and not has_gpu:
        raise InputError("--only: gpu needs a CUDA device, but torch finds none")
    measure = {
        "layouts": lambda: compare_layouts(config.rounds),
        "context": lambda: compare_context(config.rounds),
        "schedules": lambda: compare_schedules(config.rounds),
        "stages": lambda: compare_stages(config.rounds),
        "search": compare_search,
        "validation": lambda: compare_post_validation(config.rounds),
        "bytes": check_bytes,
        "memory": measure_memory,
        "gpu": measure_gpu,
    }
    output = Path(config.output)
    results = json.loads(output.read_text(encoding="utf-8")) if output.exists() else {}
    for part in parts:
        results[part] = run_metadata("parallel.py", argv) | {"results": measure[part]()}
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def run_metadata(script: str, argv: Sequence[str]) -> dict[str, object]:
    """Describe the run for the results: command, commit and machine."""
    # Not the results themselves: a table that was interrupted continues at the same commit.
    dirty = "-dirty" if git("status", "--porcelain", "--", ".", ":!benchmarks/results") else ""
    gpu = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    return {
        "command": " ".join([f"python benchmarks/{script}", *argv]),
        "commit": git("rev-parse", "--short", "HEAD") + dirty,
        "load average before": round(os.getloadavg()[0], 1),
        "machine": {
            "cores": len(os.sched_getaffinity(0)),
            "architecture": platform.machine(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            **gpu,
        },
    }


def git(*command: str) -> str:
    done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


if __name__ == "__main__":
    run_command(main)
