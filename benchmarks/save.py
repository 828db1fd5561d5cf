"""What saving costs training: --async-save against waiting for the disk, and against the copy alone.

    python benchmarks/save.py [--rounds N] [--device cpu|cuda]

A model of 103 M parameters in fp32 with Adam, so 1.2 GB a checkpoint: one process, and two that write half each. Every
round copies what a process writes to host memory, saves while training waits, saves in the background with steps of
training meanwhile, and takes the same steps again undisturbed. A process has one thread: of two cores, one process
leaves the writer a core, and two leave it none.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from parallel import about
from parallel_steps import COMMON, NO_DROPOUT, Steps, start
from parallel_workers import Workers

from megatron.checkpoint.config import CheckpointConfig
from megatron.checkpoint.save import take_snapshot
from megatron.checkpoint.saver import Saver
from megatron.cli import Parser, add_flags, make_config, run_command
from megatron.flags import Config, flag

MODEL = f"""
    {COMMON} {NO_DROPOUT} --num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 64
    --vocab-size 2047 --micro-batch-size 1
"""
PROCESSES = {"cpu": (1, 2), "cuda": (1,)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkConfig(Config):
    """Where to measure, and how often."""

    rounds: int = flag(5, "times that everything compared is run", low=1)
    device: str = flag("cpu", "device to train on", choices=("cpu", "cuda"))
    folder: str | None = flag(
        None, "folder to save in, on the disk to measure (default: one for temporary files)", metavar="DIR"
    )
    output: str = flag(
        str(ROOT / "benchmarks/results/save.json"),
        "where results go; those of the other device stay",
        metavar="FILE",
    )


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser = Parser(description=__doc__.splitlines()[0])
    add_flags(parser, BenchmarkConfig, "benchmark")
    config = make_config(BenchmarkConfig, vars(parser.parse_args(argv)))
    output = Path(config.output)
    results = json.loads(output.read_text(encoding="utf-8")) if output.exists() else {}
    results[config.device] = about("save.py", argv) | {"flags": " ".join(MODEL.split())}
    for processes in PROCESSES[config.device]:
        with tempfile.TemporaryDirectory(dir=config.folder) as folder:
            flags = f"{MODEL} --device {config.device} --global-batch-size {processes}"
            with Workers(measure, processes, flags, folder) as run:
                run.next()  # the first saves write to memory and disk that was never used
                rounds = [run.next()[0] for _ in range(config.rounds)]
        found = summary(rounds)
        print(f"{processes} process(es): {json.dumps(found)}", flush=True)
        results[config.device][f"{processes} process(es)"] = found | {"rounds": rounds}
    output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def summary(rounds: list[dict[str, float]]) -> dict[str, float]:
    """The ratios that are wanted, each the median over the rounds."""
    of = {
        "stall / copy alone": lambda r: r["stall"] / r["copy"],
        "stall / save that waits": lambda r: r["stall"] / r["save that waits"],
        "step while writing / step": lambda r: r["step while writing"] / r["step"],
        "time lost in all / save that waits": lambda r: r["lost"] / r["save that waits"],
    }
    return {name: round(statistics.median(map(ratio, rounds)), 3) for name, ratio in of.items()}


def measure(flags: str, folder: str) -> Iterator[dict[str, float]]:
    """Seconds of a round, as this process, one of the run, meets them."""
    with start(flags) as run:
        run.step()
        waiting = saver_of(run, f"{folder}/waiting", async_save=False)
        with saver_of(run, f"{folder}/going-on", async_save=True) as going_on:
            for iteration in range(1, 10**6):
                yield one_round(run, waiting, going_on, iteration)


def saver_of(run: Steps, root: str, *, async_save: bool) -> Saver:
    Path(root).mkdir(exist_ok=True)
    config = CheckpointConfig(save=root, keep_last=1, async_save=async_save)
    return Saver(config, run.engine.buffer, run.engine.optimizer, tokenizer_files={}, log=lambda _: None)


def one_round(run: Steps, waiting: Saver, going_on: Saver, iteration: int) -> dict[str, float]:
    engine, state, seconds = run.engine, {"iteration": iteration}, {}

    def timed(work, *arguments) -> float:
        run.wait()
        begin = time.perf_counter()
        work(*arguments)
        run.wait()
        return time.perf_counter() - begin

    snapshot = take_snapshot(going_on.config, state, engine.buffer, engine.optimizer)
    seconds["copy"] = timed(going_on.copy.take, snapshot)
    seconds["save that waits"] = timed(waiting.save, state)
    seconds["stall"] = timed(going_on.save, state)
    disturbed = []
    while going_on.writing is not None:
        disturbed.append(timed(run.step))
        going_on.check()
    alone = [timed(run.step) for _ in disturbed]
    seconds["step while writing"], seconds["step"] = statistics.median(disturbed), statistics.median(alone)
    seconds["steps"] = len(alone)
    seconds["lost"] = seconds["stall"] + sum(disturbed) - sum(alone)
    return {name: round(value, 4) for name, value in seconds.items()}


if __name__ == "__main__":
    run_command(main)
