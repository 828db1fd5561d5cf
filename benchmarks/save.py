"""Measure the cost of saving checkpoints: --async-save against a blocking save and against the copy alone.

    python benchmarks/save.py [--rounds N] [--device cpu|cuda]

The model has 103 M parameters in fp32 with Adam, 1.2 GB per checkpoint. It runs in one process, and in two that write
half each. Every round copies the process's part of a checkpoint to host memory, saves while training waits, saves in
the background during training steps, and repeats these steps without a save. A process has one thread. On two cores,
one process leaves a core to the writer, and two processes leave none.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from parallel import run_metadata
from parallel_steps import COMMON, NO_DROPOUT, StepRunner, start_run
from parallel_workers import Workers

from megatron.checkpoint.config import CheckpointConfig
from megatron.checkpoint.save import Saver, take_snapshot
from megatron.cli import Parser, add_flags, make_config, run_command
from megatron.flags import Config, flag
from megatron.performance.async_save import AsyncSaver
from megatron.recipes.config import RetentionConfig
from megatron.recipes.retention import discard_older

MODEL = f"""
    {COMMON} {NO_DROPOUT} --num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 64
    --vocab-size 2047 --micro-batch-size 1
"""
PROCESSES = {"cpu": (1, 2), "cuda": (1,)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkConfig(Config):
    """Options of the benchmark."""

    rounds: int = flag(5, "measured rounds", low=1)
    device: str = flag("cpu", "device to train on", choices=("cpu", "cuda"))
    folder: str | None = flag(
        None, "directory to save in, on the disk to measure (default: a temporary directory)", metavar="DIR"
    )
    output: str = flag(
        str(ROOT / "benchmarks/results/save.json"),
        "file to write the results to; results of the other device are kept",
        metavar="FILE",
    )


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser = Parser(description=__doc__.splitlines()[0])
    add_flags(parser, BenchmarkConfig, "benchmark")
    config = make_config(BenchmarkConfig, vars(parser.parse_args(argv)))
    output = Path(config.output)
    results = json.loads(output.read_text(encoding="utf-8")) if output.exists() else {}
    results[config.device] = run_metadata("save.py", argv) | {"flags": " ".join(MODEL.split())}
    for processes in PROCESSES[config.device]:
        with tempfile.TemporaryDirectory(dir=config.folder) as folder:
            flags = f"{MODEL} --device {config.device} --global-batch-size {processes}"
            with Workers(measure, processes, flags, folder) as run:
                run.next()  # the first saves allocate host memory and disk blocks
                rounds = [run.next()[0] for _ in range(config.rounds)]
        medians = summarize(rounds)
        print(f"{processes} process(es): {json.dumps(medians)}", flush=True)
        results[config.device][f"{processes} process(es)"] = medians | {"rounds": rounds}
    output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def summarize(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Return the ratios, medians over the rounds."""
    ratios = {
        "stall / copy alone": lambda r: r["stall"] / r["copy"],
        "stall / save that waits": lambda r: r["stall"] / r["save that waits"],
        "step while writing / step": lambda r: r["step while writing"] / r["step"],
        "time lost in all / save that waits": lambda r: r["lost"] / r["save that waits"],
    }
    return {name: round(statistics.median(map(ratio, rounds)), 3) for name, ratio in ratios.items()}


def measure(flags: str, folder: str) -> Iterator[dict[str, float]]:
    """Yield the seconds of each round on this process."""
    with start_run(flags) as run:
        run.step()
        blocking_saver = make_saver(run, f"{folder}/blocking")
        with AsyncSaver(**vars(make_saver(run, f"{folder}/async"))) as async_saver:
            for iteration in range(1, 10**6):
                yield measure_round(run, blocking_saver, async_saver, iteration)


def make_saver(run: StepRunner, root: str) -> Saver:
    Path(root).mkdir(exist_ok=True)
    config = CheckpointConfig(save=root)
    saver = Saver(config, run.engine.buffer, run.engine.optimizer, tokenizer_files={}, log=lambda _: None)
    saver.after_write.append(functools.partial(discard_older, config=RetentionConfig(keep_last=1)))
    return saver


def measure_round(
    run: StepRunner, blocking_saver: Saver, async_saver: AsyncSaver, iteration: int
) -> dict[str, float]:
    engine, state, seconds = run.engine, {"iteration": iteration}, {}

    def timed(work, *arguments) -> float:
        run.wait()
        begin = time.perf_counter()
        work(*arguments)
        run.wait()
        return time.perf_counter() - begin

    snapshot = take_snapshot(async_saver.config, state, engine.buffer, engine.optimizer)
    seconds["copy"] = timed(async_saver.copy.take, snapshot)
    seconds["save that waits"] = timed(blocking_saver.save, state)
    seconds["stall"] = timed(async_saver.save, state)
    overlapped = []
    while async_saver.writing is not None:
        overlapped.append(timed(run.step))
        async_saver.check()
    alone = [timed(run.step) for _ in overlapped]
    seconds["step while writing"], seconds["step"] = statistics.median(overlapped), statistics.median(alone)
    seconds["steps"] = len(alone)
    seconds["lost"] = seconds["stall"] + sum(overlapped) - sum(alone)
    return {name: round(value, 4) for name, value in seconds.items()}


if __name__ == "__main__":
    run_command(main)
