"""Measure the seconds from the command to the end of the first iteration, by phase, for a small model on a CPU.

    python benchmarks/startup.py [--vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt]

Runs pretrain_gpt.py in new processes: cold, without cached sample indices and compiled code, then warm. The cases are
one process with torch.compile, one without, and two processes under torchrun. "of the processor" is the CPU time of the
training process alone, a lower bound for the time on a machine that does other work.
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

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from parallel import run_metadata

from megatron.cli import Parser, add_flags, make_config, run_command
from megatron.data.indexed_writer import IndexedDatasetWriter
from megatron.errors import InputError
from megatron.flags import Config, flag

VOCAB_SIZE, DOCUMENTS, DOCUMENT_LENGTH = 50256, 10_000, 1000
MODEL = """
    --num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 256 --micro-batch-size 4 --lr 1e-3
    --train-iters 1 --log-interval 1 --eval-iters 0 --device cpu
"""
# Number of processes, and flags in addition to those of the model, by name.
RUNS = {
    "compiled": (1, ""),
    "nothing compiled": (1, "--no-torch-compile"),
    "two processes, nothing compiled": (2, "--no-torch-compile"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkConfig(Config):
    """Options of the benchmark."""

    vocab_file: str | None = flag(
        None, "vocab.json of a GPT-2 BPE tokenizer to load (default: NullTokenizer)", metavar="FILE"
    )
    merge_file: str | None = flag(None, "merges.txt of the same tokenizer", metavar="FILE")
    rounds: int = flag(3, "warm starts; the median is reported", low=1)
    output: str = flag(
        str(ROOT / "benchmarks/results/startup.json"), "file to write the results to", metavar="FILE"
    )


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser = Parser(description=__doc__.splitlines()[0])
    add_flags(parser, BenchmarkConfig, "benchmark")
    config = make_config(BenchmarkConfig, vars(parser.parse_args(argv)))
    results = run_metadata("startup.py", argv) | {
        "flags": " ".join(MODEL.split()),
        "imports": measure_imports(),
    }
    for name, (processes, flags) in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            write_data(Path(folder) / "data")
            command_flags = [
                *MODEL.split(),
                *flags.split(),
                *tokenizer_flags(config),
                "--data-path",
                f"{folder}/data",
            ]
            starts = [run_start(Path(folder), processes, command_flags) for _ in range(1 + config.rounds)]
        cold, *warm = starts
        results[name] = {
            "cold": cold,
            "warm": {phase: round(statistics.median(s[phase] for s in warm), 2) for phase in cold},
        }
        print(f"{name}: {json.dumps(results[name], indent=2)}", flush=True)
    Path(config.output).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def tokenizer_flags(config: BenchmarkConfig) -> list[str]:
    """Return the flags that select the tokenizer."""
    if (config.vocab_file is None) != (config.merge_file is None):
        raise InputError("--vocab-file and --merge-file: give both or neither")
    if config.vocab_file is None:
        return ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(VOCAB_SIZE)]
    return ["--vocab-file", config.vocab_file, "--merge-file", config.merge_file]


def write_data(prefix: Path) -> None:
    """Write an indexed dataset of documents with random tokens."""
    tokens = np.random.default_rng(0).integers(VOCAB_SIZE, size=(DOCUMENTS, DOCUMENT_LENGTH), dtype=np.uint16)
    with IndexedDatasetWriter(str(prefix), dtype=np.uint16) as writer:
        for document in tokens:
            writer.add_document([document])


def run_start(folder: Path, processes: int, flags: list[str]) -> dict[str, float]:
    """Start pretrain_gpt.py and return the seconds of each phase. `folder` keeps the caches for the next start."""
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={processes}"] if processes > 1 else []
    phases = folder / "phases.json"
    script = ["benchmarks/startup_run.py", str(time.time()), str(phases), *flags]
    subprocess.run(
        [sys.executable, *launcher, *script],
        cwd=ROOT,
        env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled")},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    return {name: round(seconds, 2) for name, seconds in json.loads(phases.read_text()).items()}


def measure_imports() -> dict[str, float]:
    """Return the import time in seconds of torch, and of pretrain_gpt.py, by `python -X importtime`."""
    report = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "import torch, megatron.pretrain_gpt"],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        check=True,
    ).stderr
    # "import time: self [us] | cumulative | imported package"
    columns = [line.split("|") for line in report.splitlines()]
    cumulative = {
        name.removeprefix(" "): int(total) / 1e6 for _, total, name in columns if total.strip().isdigit()
    }
    return {"torch": round(cumulative["torch"], 2), "the rest": round(cumulative["megatron.pretrain_gpt"], 2)}


if __name__ == "__main__":
    run_command(main)
