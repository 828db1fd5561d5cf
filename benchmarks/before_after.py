"""Compare training steps of this checkout with those of another one, such as the commit before a redesign.

    git worktree add ../before COMMIT
    python benchmarks/before_after.py --before ../before [--sizes small] [--precisions fp32 bf16] [--rounds N]

Each checkout trains in its own process, with the sizes and steps of its own benchmarks/train.py. Steps of the two
checkouts alternate, so both run under the same load of the machine. The ratio is the median over the rounds.
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

from parallel import run_metadata

from megatron.cli import Parser, add_flags, make_config, run_command
from megatron.errors import InputError
from megatron.flags import Config, flag

WARM_UP = 4
# Runs one step for each line it reads, and prints its seconds and loss.
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
    """Options of the benchmark."""

    before: str = flag(None, "checkout to compare with", metavar="DIR", required=True)
    sizes: tuple[str, ...] = flag(("small",), "model sizes, as in benchmarks/train.py", nargs="+")
    precisions: tuple[str, ...] = flag(
        ("bf16", "fp32"), "precisions to measure", choices=("bf16", "fp32"), nargs="+"
    )
    rounds: int = flag(15, "measured steps per checkout", low=1)
    threads: int = flag(2, "threads per checkout", low=1)
    output: str = flag(
        str(ROOT / "benchmarks/results/before_after.json"), "file to write the results to", metavar="FILE"
    )


class Side:
    """A checkout that trains in its own process."""

    def __init__(self, checkout: Path, size: str, precision: str, threads: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(checkout), size, precision, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=checkout,
            env={**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)},
        )

    def step(self) -> tuple[float, float]:
        """Run the next step and return its seconds and loss."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        for line in self.process.stdout:  # other lines are log output
            if line.startswith("step "):
                _, seconds, loss = line.split()
                return float(seconds), float(loss)
        raise InputError("the process of a checkout exited; see its message above")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def compare(config: BenchmarkConfig, size: str, precision: str) -> dict[str, float]:
    """Return median seconds per step of both checkouts, and the speedup of this one."""
    checkouts = {"before": Path(config.before).resolve(), "after": ROOT}
    sides = {name: Side(checkout, size, precision, config.threads) for name, checkout in checkouts.items()}
    try:
        rounds = []
        for number in range(WARM_UP + config.rounds):
            # Alternate which checkout goes first.
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
    results = run_metadata("before_after.py", ["--before", "DIR"])
    for size in config.sizes:
        for precision in config.precisions:
            results[f"{size}, {precision}"] = result = compare(config, size, precision)
            print(
                f"{size}, {precision}: " + "  ".join(f"{key} {value:,}" for key, value in result.items()),
                flush=True,
            )
            Path(config.output).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run_command(main)
