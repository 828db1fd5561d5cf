"""Measure the first hour of a new user: from a clone to the first loss and to the end of the quick start, and --help.

    python benchmarks/first_hour.py

The quick start runs in a clone of this repository's last commit, with an empty cache of compiled code and with the
packages of the Python that runs this script. Each figure stands beside its goal. The whole takes seven minutes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from parallel import run_metadata

from megatron.cli import Parser, add_flags, make_config, run_command
from megatron.flags import Config, flag

# Largest values.
GOALS = {
    "seconds from clone to first loss": 180,
    "seconds from clone to end of quick start": 360,
    "lines before the first loss": 14,
    "MB of the report": 2,
    "seconds of megatron --help": 0.3,
    "seconds of megatron pretrain-gpt --help": 2,
    "data commands that import torch": 0,
}
DATA_MODULES = ("make_corpus", "train_tokenizer", "preprocess_data", "merge_datasets", "inspect_data")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkConfig(Config):
    """Options of the benchmark."""

    rounds: int = flag(5, "starts of each --help; the median is reported", low=1)
    output: str = flag(
        str(ROOT / "benchmarks/results/first_hour.json"), "file to write the results to", metavar="FILE"
    )


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser = Parser(description=__doc__.splitlines()[0])
    add_flags(parser, BenchmarkConfig, "benchmark")
    config = make_config(BenchmarkConfig, vars(parser.parse_args(argv)))
    results = run_metadata("first_hour.py", argv)
    with tempfile.TemporaryDirectory() as folder:
        found = quick_start(Path(folder))
    found |= {
        f"seconds of megatron {command}": help_seconds(command.split(), config.rounds)
        for command in ("--help", "pretrain-gpt --help")
    }
    found["data commands that import torch"] = sum(map(imports_torch, DATA_MODULES))
    for name, value in found.items():
        verdict = "reached" if value <= GOALS[name] else "MISSED"
        print(f"{name:44}{value:8}   goal {GOALS[name]:4}   {verdict}")
    results |= {name: {"value": value, "goal": GOALS[name]} for name, value in found.items()}
    Path(config.output).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def quick_start(folder: Path) -> dict[str, float]:
    """Clone the repository into `folder` and run the quick start."""
    clone = folder / "clone"
    environment = {
        **os.environ,
        "PYTHON": sys.executable,
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled"),
    }
    begin = time.perf_counter()
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    first, lines, in_training = 0.0, 0, False
    with subprocess.Popen(
        ["bash", "scripts/pretrain_gpt.sh"], cwd=clone, env=environment, text=True, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if line.startswith("+"):
                in_training = "pretrain_gpt.py" in line
            elif in_training and not first:
                if "loss" in line:
                    first = time.perf_counter() - begin
                else:
                    lines += 1
    assert process.returncode == 0, process.returncode
    end = time.perf_counter() - begin
    report = clone / "quickstart/checkpoints/report.html"
    return {
        "seconds from clone to first loss": round(first, 1),
        "seconds from clone to end of quick start": round(end, 1),
        "lines before the first loss": lines,
        "MB of the report": round(report.stat().st_size / 1e6, 2),
    }


def help_seconds(command: Sequence[str], rounds: int) -> float:
    """Median seconds of a command of `python -m megatron`."""

    def seconds() -> float:
        begin = time.perf_counter()
        run_python(["-m", "megatron", *command])
        return time.perf_counter() - begin

    return round(statistics.median(seconds() for _ in range(rounds)), 2)


def imports_torch(command: str) -> bool:
    """True if a data command imports torch when it starts."""
    script = f"import sys, megatron.commands.{command}; print('torch' in sys.modules)"
    return run_python(["-c", script]).strip() == "True"


def run_python(arguments: Sequence[str]) -> str:
    """Run Python in the repository's root. Returns what it prints."""
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


if __name__ == "__main__":
    run_command(main)
