"""The planner's predictions for this CPU beside measured steps, in layouts of two processes of one thread.

    python benchmarks/planner_cpu.py [--rounds 5] [--cluster here.yaml]

Without --cluster it first calibrates, as `tools/plan.py --calibrate` does. The machine should have nothing else to do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from parallel import about
from parallel_steps import PP, SPEED, TP, time_steps
from parallel_workers import Workers

from megatron.arguments import Parser, add_flags, make_config, parse_run_config, run_command
from megatron.flags import Config, flag
from megatron.planner.calibrate import calibrate
from megatron.planner.cluster import Cluster
from megatron.planner.description import read_cluster
from megatron.planner.layout import OURS, Job, Layout
from megatron.planner.simulate import Simulator
from pretrain_gpt import DEFAULTS

RUNS = {
    "T2": (TP, Layout(tensor=2)),
    "P2": (PP, Layout(pipeline=2)),
    "D2": ("", Layout(data=2)),
    "P2V2": (f"{PP} --num-layers-per-virtual-pipeline-stage 1", Layout(pipeline=2, chunks=2)),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkConfig(Config):
    """What to measure with, and how often."""

    rounds: int = flag(5, "steps of every layout, in turns", low=1)
    cluster: str | None = flag(None, "file of a calibration (default: calibrate first)", metavar="FILE")
    flags: str = flag("", "of pretrain_gpt.py, to change the model that is measured")
    output: str = flag(str(ROOT / "benchmarks/results/planner_cpu.json"), "where results go", metavar="FILE")


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser = Parser(description=__doc__)
    add_flags(parser, BenchmarkConfig, "benchmark")
    config = make_config(BenchmarkConfig, vars(parser.parse_args(argv)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(config.cluster or f"{folder}/here.yaml")
        if config.cluster is None:
            calibrate(path)
        cluster = read_cluster(path)
    flags = f"{SPEED} {config.flags}"
    measured = measure(flags, config.rounds)
    results = {}
    for name, (_, layout) in RUNS.items():
        predicted = predict(flags, layout, cluster)
        results[name] = {
            "measured": round(measured[name], 4),
            "predicted": round(predicted, 4),
            "error": round(predicted / measured[name] - 1, 4),
        }
        print(f"{name}: {results[name]}", flush=True)
    found = about("planner_cpu.py", argv) | {"flags": " ".join(flags.split()), "results": results}
    Path(config.output).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def measure(flags: str, rounds: int) -> dict[str, float]:
    """Median seconds of a step of each layout."""
    seconds: dict[str, list[float]] = {name: [] for name in RUNS}
    with contextlib.ExitStack() as stack:
        workers = {
            name: stack.enter_context(Workers(time_steps, 2, f"{flags} {more}"))
            for name, (more, _) in RUNS.items()
        }
        for run in workers.values():
            run.next()
        for _ in range(rounds):
            for name, run in workers.items():
                seconds[name].append(run.next()[0])
    return {name: statistics.median(times) for name, times in seconds.items()}


def predict(flags: str, layout: Layout, cluster: Cluster) -> float:
    """Seconds of a step of the run that the flags describe."""
    run = parse_run_config(flags.split(), description="", defaults=DEFAULTS)
    job = Job(run.model, run.data.seq_length, run.tokenizer.vocab_size + 1, run.training.global_batch_size)
    whole = dataclasses.replace(layout, micro_batch_size=run.training.micro_batch_size)
    return Simulator(job, whole, cluster, OURS).step().seconds


if __name__ == "__main__":
    run_command(main)
