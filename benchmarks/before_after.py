"""Training steps of this checkout against those of another, such as of the commit before a redesign.

    git worktree add ../before COMMIT
    python benchmarks/before_after.py --before ../before [--sizes small] [--precisions fp32 bf16] [--rounds N]

Each checkout trains in a process of its own, with the sizes and steps of its benchmarks/train.py. Steps alternate, so
that both meet the same conditions of the machine; the ratio is the median over the rounds.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from parallel import about

from megatron.cli import Parser, add_flags, make_config, run_command
from megatron.errors import InputError
from megatron.flags import Config, flag

WARM_UP = 4
# Reads a line for each step, and prints its seconds and its loss.
WORKER = """
import sys
sys.path[:0] = [f"{sys.argv[1]}/benchmarks", sys.argv[1]]
import torch
torch.set_num_threads(int(sys.argv[4]))
import train
for _, (seconds, _, loss) in zip(sys.stdin, train.ours("cpu", train.SIZES[sys.argv[2]], sys.argv[3])):
    print("step", seconds, loss, flush=True)
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkConfig(Config):
    """The checkouts and steps to compare."""

    before: str = flag(None, "the other checkout", metavar="DIR", required=True)
    sizes: tuple[str, ...] = flag(("small",), "models of benchmarks/train.py", nargs="+")
    precisions: tuple[str, ...] = flag(("bf16", "fp32"), "precisions", choices=("bf16", "fp32"), nargs="+")
    rounds: int = flag(15, "measured steps of each side", low=1)
    threads: int = flag(2, "threads of each side", low=1)
    output: str = flag(
        str(ROOT / "benchmarks/results/before_after.json"), "file of the results", metavar="FILE"
    )


class Side:
    """A checkout that trains in a process of its own."""

    def __init__(self, tree: Path, size: str, precision: str, threads: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(tree), size, precision, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=tree,
            env={**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)},
        )

    def step(self) -> tuple[float, float]:
        """Seconds and loss of the next step."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        for line in self.process.stdout:  # other lines are the checkout's log
            if line.startswith("step "):
                _, seconds, loss = line.split()
                return float(seconds), float(loss)
        raise InputError("a checkout's process ended; see its message above")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def compare(config: BenchmarkConfig, size: str, precision: str) -> dict[str, float]:
    """Median seconds of a step of both sides, and how many times faster this checkout is."""
    trees = {"before": Path(config.before).resolve(), "after": ROOT}
    sides = {name: Side(tree, size, precision, config.threads) for name, tree in trees.items()}
    try:
        rounds = []
        for number in range(WARM_UP + config.rounds):
            # The side that comes first alternates too.
            order = list(sides) if number % 2 else list(sides)[::-1]
            rounds.append({name: sides[name].step() for name in order})
    finally:
        for side in sides.values():
            side.close()
    rounds = rounds[WARM_UP:]
    before, after = ([step[name][0] for step in rounds] for name in ("before", "after"))
    return {
        "seconds before": round(statistics.median(before), 4),
        "seconds after": round(statistics.median(after), 4),
        "before over after": round(statistics.median(b / a for b, a in zip(before, after, strict=True)), 3),
        "loss before": rounds[-1]["before"][1],
        "loss after": rounds[-1]["after"][1],
    }


def main(argv: Sequence[str] | None = None) -> None:
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = Parser(description=__doc__)
    add_flags(parser, BenchmarkConfig, "benchmark")
    config = make_config(BenchmarkConfig, vars(parser.parse_args(argv)))
    if not (Path(config.before) / "benchmarks/train.py").is_file():
        raise InputError(f"--before: {config.before} is not a checkout of this repository")
    results = about("before_after.py", ["--before", "DIR"])
    for size in config.sizes:
        for precision in config.precisions:
            results[f"{size}, {precision}"] = found = compare(config, size, precision)
            print(
                f"{size}, {precision}: " + "  ".join(f"{key} {value:,}" for key, value in found.items()),
                flush=True,
            )
            Path(config.output).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run_command(main)
