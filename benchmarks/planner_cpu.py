"""Compare the planner's predictions for this CPU with measured steps, in layouts of two single-threaded processes.

    python benchmarks/planner_cpu.py [--turns 3] [--rounds 3]

Calibrations as by `tools/plan.py --calibrate` alternate with measurements, because the speed of a shared machine
changes from minute to minute. Run this on an otherwise idle machine.
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

from parallel import run_metadata
from parallel_steps import PP, SPEED, TP, time_steps
from parallel_workers import Workers

from megatron.arguments import parse_run_config
from megatron.cli import Parser, add_flags, make_config, run_command
from megatron.flags import Config, flag
from megatron.planner.calibrate import calibrate
from megatron.planner.cluster import Cluster
from megatron.planner.description import read_cluster
from megatron.planner.layout import Job, Layout
from megatron.planner.programs import OURS
from megatron.planner.simulate import Simulator
from megatron.pretrain_gpt import DEFAULTS

RUNS = {
    "T2": (TP, Layout(tensor=2)),
    "P2": (PP, Layout(pipeline=2)),
    "D2": ("", Layout(data=2)),
    "P2V2": (f"{PP} --num-layers-per-virtual-pipeline-stage 1", Layout(pipeline=2, chunks=2)),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkConfig(Config):
    """Options of the benchmark."""

    turns: int = flag(3, "number of calibrations, each followed by measurements", low=1)
    rounds: int = flag(3, "measured steps per layout and calibration", low=1)
    flags: str = flag("", "flags of pretrain_gpt.py that change the measured model")
    output: str = flag(
        str(ROOT / "benchmarks/results/planner_cpu.json"), "file to write the results to", metavar="FILE"
    )


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser = Parser(description=__doc__)
    add_flags(parser, BenchmarkConfig, "benchmark")
    config = make_config(BenchmarkConfig, vars(parser.parse_args(argv)))
    flags = f"{SPEED} {config.flags}"
    turns = []
    with contextlib.ExitStack() as stack:
        path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "here.yaml"
        workers = {
            name: stack.enter_context(Workers(time_steps, 2, f"{flags} {more}"))
            for name, (more, _) in RUNS.items()
        }
        for run in workers.values():
            run.next()
        for _ in range(config.turns):
            calibrate(path)
            measured = measure(workers, config.rounds)
            cluster = read_cluster(path)
            predicted = {name: predict(flags, layout, cluster) for name, (_, layout) in RUNS.items()}
            turns.append({name: {"measured": measured[name], "predicted": predicted[name]} for name in RUNS})
            print({name: f"{errors(turns[-1:])[name]:+.1%}" for name in RUNS}, flush=True)
    results = run_metadata("planner_cpu.py", argv) | {
        "flags": " ".join(flags.split()),
        "seconds": turns,
        "predicted / measured - 1": errors(turns),
    }
    print(f"median over the turns: { {name: f'{error:+.1%}' for name, error in errors(turns).items()} }")
    Path(config.output).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def errors(turns: list[dict[str, dict[str, float]]]) -> dict[str, float]:
    """Return the relative error of the prediction for each layout, the median over the turns."""
    return {
        name: round(
            statistics.median(turn[name]["predicted"] / turn[name]["measured"] for turn in turns) - 1, 4
        )
        for name in RUNS
    }


def measure(workers: dict[str, Workers], rounds: int) -> dict[str, float]:
    """Return the median seconds per step of each layout."""
    seconds: dict[str, list[float]] = {name: [] for name in workers}
    for _ in range(rounds):
        for name, run in workers.items():
            seconds[name].append(run.next()[0])
    return {name: round(statistics.median(times), 4) for name, times in seconds.items()}


def predict(flags: str, layout: Layout, cluster: Cluster) -> float:
    """Predict the seconds per step of the run that the flags describe."""
    run = parse_run_config(flags.split(), description="", defaults=DEFAULTS)
    job = Job(run.model, run.data.seq_length, run.tokenizer.vocab_size + 1, run.training.global_batch_size)
    whole = dataclasses.replace(layout, micro_batch_size=run.training.micro_batch_size)
    return round(Simulator(job, whole, cluster, OURS).step().seconds, 4)


if __name__ == "__main__":
    run_command(main)
