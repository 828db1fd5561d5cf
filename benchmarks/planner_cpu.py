"""Compare the planner's predictions for this CPU with measured steps of every layout that the tests train.

    python benchmarks/planner_cpu.py [--layouts T2 D2 ...] [--precisions fp32 bf16] [--rounds 24]

Runs have single-threaded processes, one on each of two cores or one alone. A pass on a shared machine may take twice
as long as the one before it, and the mean of 20 s still varies by a tenth. So each round is a cycle of the measurements
of `tools/plan.py --calibrate` and a step of each layout of a group; constants are fitted to the means of the group's
cycles, and the mean step is compared. The standard error of a difference is that of the jackknife over rounds, so that
it has the noise of the constants and of the steps. Run this on an otherwise idle machine.

Mixtures choose experts at random, as in NVIDIA's benchmarks (--moe-router-force-load-balancing): the planner takes each
expert as equally likely, while an untrained router gives one of two ranks up to 13% more rows than the mean.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import parallel_steps
from parallel import run_metadata
from parallel_steps import COMMON, FULL, NO_DROPOUT, PP, TP, StepRunner
from parallel_workers import Workers

from megatron.arguments import parse_run_config
from megatron.cli import Parser, add_flags, make_config, run_command
from megatron.errors import InputError
from megatron.flags import Config, flag
from megatron.model.moe.router import Router
from megatron.planner.calibrate import cycles, fit_cluster, mean_of
from megatron.planner.cluster import Cluster
from megatron.planner.given import given_run
from megatron.planner.layout import Job, Layout
from megatron.planner.programs import OURS
from megatron.planner.simulate import Simulator
from megatron.pretrain_gpt import DEFAULTS

MODEL = f"""
    {COMMON} {NO_DROPOUT} --device cpu --num-layers 4 --hidden-size 512 --num-attention-heads 8
    --seq-length 256 --vocab-size 2047 --micro-batch-size 1 --global-batch-size 8
"""
CP, SHARDED = "--context-parallel-size 2 --cp-comm-type", "--data-parallel-sharding-strategy"
MIXTURE = (
    "--disable-bias-linear --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 1024 --moe-grouped-gemm"
)
# Processes and flags by name.
LAYOUTS = {
    "one": (1, ""),
    "one, selective recomputation": (1, "--recompute-granularity selective"),
    "one, full recomputation": (1, FULL),
    "one, mixture": (1, MIXTURE),
    "T2": (2, TP),
    "T2+SP": (2, f"{TP} --sequence-parallel"),
    "T2+SP, full recomputation": (2, f"{TP} --sequence-parallel {FULL}"),
    "E2": (2, f"{MIXTURE} --expert-model-parallel-size 2"),
    "D2": (2, ""),
    "D2, distributed optimizer": (2, "--use-distributed-optimizer"),
    "D2, ZeRO-2": (2, f"{SHARDED} optim_grads"),
    "D2, ZeRO-3": (2, f"{SHARDED} optim_grads_params"),
    "P2": (2, PP),
    "P2V2": (2, f"{PP} --num-layers-per-virtual-pipeline-stage 1"),
    "P2, zb-h1": (2, f"{PP} --pipeline-schedule zb-h1"),
    "P2, zb-v": (2, f"{PP} --pipeline-schedule zb-v --num-layers-per-virtual-pipeline-stage 1"),
    "C2, p2p": (2, f"{CP} p2p"),
    "C2, all_gather": (2, f"{CP} all_gather"),
    "C2, a2a": (2, f"{CP} a2a"),
}
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
GROUP = 8  # runs that are kept in memory at the same time


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkConfig(Config):
    """Options of the benchmark."""

    layouts: tuple[str, ...] = flag(
        tuple(LAYOUTS), "layouts to measure", choices=tuple(LAYOUTS), nargs="+", metavar="NAME"
    )
    precisions: tuple[str, ...] = flag(
        tuple(PRECISIONS), "precisions to measure", choices=tuple(PRECISIONS), nargs="+"
    )
    rounds: int = flag(24, "measured steps of each layout", low=2)
    flags: str = flag("", "flags of pretrain_gpt.py that change the measured model")
    output: str = flag(
        str(ROOT / "benchmarks/results/planner_cpu.json"), "file to write the results to", metavar="FILE"
    )


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser = Parser(description=__doc__)
    add_flags(parser, BenchmarkConfig, "benchmark")
    config = make_config(BenchmarkConfig, vars(parser.parse_args(argv)))
    metadata, begin = run_metadata("planner_cpu.py", argv), time.perf_counter()
    names = planned(config)
    rows: list[dict[str, object]] = []
    for precision in config.precisions:
        for row in compare(config, names, precision):
            rows.append(row)
            print(
                f"{precision}, {row['layout']}: {row['measured']} s, predicted {row['predicted']} s "
                f"({row['error']:+.1%}, standard error {row['standard error']:.1%})",
                flush=True,
            )
            results = metadata | {
                "flags": " ".join(f"{MODEL} {config.flags}".split()),
                "minutes": round((time.perf_counter() - begin) / 60, 1),
                "steps": rows,
            }
            Path(config.output).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    errors = {f"{row['precision']}, {row['layout']}": float(str(row["error"])) for row in rows}
    print(f"mean absolute error: {statistics.mean(map(abs, errors.values())):.1%}")
    worst = max(errors, key=lambda name: abs(errors[name]))
    print(f"largest error: {errors[worst]:+.1%} ({worst})")


def given(flags: str, name: str) -> tuple[Job, Layout]:
    """Return the job and the layout of a run. Raises InputError if the planner has no words for it."""
    processes, more = LAYOUTS[name]
    run = parse_run_config(f"{flags} {more}".split(), description="", defaults=DEFAULTS)
    return given_run(run, processes)


def planned(config: BenchmarkConfig) -> list[str]:
    """Return the layouts that the planner knows; print the others."""
    names = []
    for name in config.layouts:
        try:
            given(f"{MODEL} {config.flags}", name)
        except InputError as error:
            print(f"{name}: {error}", flush=True)
        else:
            names.append(name)
    return names


def compare(config: BenchmarkConfig, layouts: Sequence[str], precision: str) -> Iterator[dict[str, object]]:
    """Yield measured and predicted seconds of a step of each layout."""
    flags = f"{MODEL} {config.flags} {'--bf16' if precision == 'bf16' else ''}"
    for processes in (1, 2):
        names = [name for name in layouts if LAYOUTS[name][0] == processes]
        for group in (names[i : i + GROUP] for i in range(0, len(names), GROUP)):
            found, steps = measure(flags, group, precision, config.rounds)
            rounds = range(config.rounds)
            without = [[i for i in rounds if i != left_out] for left_out in rounds]
            fit = functools.partial(fit_rounds, found, processes, PRECISIONS[precision])
            clusters = [fit(used) for used in (rounds, *without)]
            for name, seconds in steps.items():
                job, layout = given(flags, name)
                predicted = [Simulator(job, layout, cluster, OURS).step().seconds for cluster in clusters]
                measured = [statistics.mean(seconds[i] for i in used) for used in (rounds, *without)]
                error, *errors = (x / y - 1 for x, y in zip(predicted, measured, strict=True))
                yield {
                    "precision": precision,
                    "layout": name,
                    "measured": round(measured[0], 4),
                    "predicted": round(predicted[0], 4),
                    "error": round(error, 4),
                    "standard error": round(jackknife(errors), 4),
                    "steps": [round(x, 3) for x in seconds],
                }


def fit_rounds(
    found: Sequence[dict[str, float]], processes: int, dtype: torch.dtype, used: Sequence[int]
) -> Cluster:
    """Return the cluster of the cycles of these rounds."""
    return fit_cluster(mean_of([found[i] for i in used]), processes, dtype)


def jackknife(estimates: Sequence[float]) -> float:
    """Return the standard error of an estimate from those that leave out one round each."""
    n = len(estimates)
    return math.sqrt((n - 1) * statistics.pvariance(estimates))


def time_steps(flags: str) -> Iterator[float]:
    """Yield the seconds of each step, with experts that are equally likely."""
    return parallel_steps.time_steps(flags, choose_experts_at_random)


def choose_experts_at_random(run: StepRunner) -> None:
    torch.manual_seed(run.mesh.world.rank)  # ranks with other tokens choose other experts
    for module in (module for chunk in run.engine.modules for module in chunk.modules()):
        if isinstance(module, Router):
            module.logits = functools.partial(random_logits, module.logits)


def random_logits(logits: Callable[[Tensor], Tensor], x_sbh: Tensor) -> Tensor:
    """Normal numbers in place of a router's logits, whose gradient they pass on: the router computes all it does."""
    logits_sbe = logits(x_sbh)
    return logits_sbe + (torch.randn_like(logits_sbe) - logits_sbe).detach()


def calibrate(processes: int, precision: str) -> Iterator[dict[str, float]]:
    """Yield the cycles of a calibration."""
    dist.init_process_group("gloo")
    yield from cycles(dist.get_rank(), processes, PRECISIONS[precision])


def measure(
    flags: str, names: Sequence[str], precision: str, rounds: int
) -> tuple[list[dict[str, float]], dict[str, list[float]]]:
    """Measure a cycle and a step of each layout in each round.

    Returns:
        The cycles, and the seconds of the steps of each layout.
    """
    found: list[dict[str, float]] = []
    steps: dict[str, list[float]] = {name: [] for name in names}
    processes = LAYOUTS[names[0]][0]
    with contextlib.ExitStack() as stack:
        workers = {}
        for name in names:
            workers[name] = stack.enter_context(Workers(time_steps, processes, f"{flags} {LAYOUTS[name][1]}"))
        for run in workers.values():
            run.next()
        calibration = stack.enter_context(Workers(calibrate, processes, processes, precision))
        calibration.next()
        for _ in range(rounds):
            found.append(calibration.next()[0])
            for name, run in workers.items():
                steps[name].append(run.next()[0])
    return found, steps


if __name__ == "__main__":
    run_command(main)
