"""Count the faults that `megatron verify` finds, and its false alarms.

    python benchmarks/verify.py [--only faults|clean] [--match PATTERN]

"faults" puts one fault after the other into the program (`verify_faults.py`), and verifies a small run with it. A fault
is caught if a comparison fails, and located if the finding names the right kind of tensor, module and kind of fault.
"clean" verifies runs without faults. Results are written after each run.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from parallel import run_metadata
from verify_faults import FAULTS, Fault, mutate

from megatron.cli import Parser, add_flags, make_config, run_command
from megatron.commands.verify import parse, train_rank
from megatron.flags import Config, flag
from megatron.verify.launch import Failure, launch
from megatron.verify.runner import STEPS, Check, Verification
from megatron.verify.shrink import Layout, Shrunk, command_words, shrink

COMMON = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 "
    "--global-batch-size 4 --train-iters 3 --lr 2e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 250 "
    "--hidden-dropout 0 --attention-dropout 0"
)
RUNS = {
    "t2": "--tensor-model-parallel-size 2",
    "t2 sequence": "--tensor-model-parallel-size 2 --sequence-parallel",
    "t2 groups": "--tensor-model-parallel-size 2 --group-query-attention --num-query-groups 1",
    "p2": "--pipeline-model-parallel-size 2",
    "p2 interleaved": "--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
    "d2": "",
    "d2 distributed": "--use-distributed-optimizer",
    "d2 dropout": "--use-distributed-optimizer --hidden-dropout 0.1",
    "d2 bf16": "--use-distributed-optimizer --bf16",
}
# Flags of clean runs, which are verified in t2, p2, d2 and t2p2, with resumes.
CLEAN = {
    "fp32": "",
    "sequence parallelism, distributed optimizer": "--sequence-parallel --use-distributed-optimizer",
    "bf16": "--bf16 --use-distributed-optimizer",
    "fp16": "--fp16",
    "Llama": "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2",
    "bf16, Llama, sequence parallelism": "--bf16 --sequence-parallel --swiglu --normalization RMSNorm "
    "--position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights",
    "one group": "--group-query-attention --num-query-groups 1",
    "dropout": "--hidden-dropout 0.1 --attention-dropout 0.1 --use-distributed-optimizer",
    "Muon": "--optimizer muon",
    "overlap": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    "gradients reduced in bf16": "--bf16 --grad-reduce-in-bf16",
}
CLEAN_LAYOUTS = (Layout(2, 2, 1), Layout(2), Layout(1, 2), Layout(1, 1, 2))


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkConfig(Config):
    """Options of the benchmark."""

    only: str | None = flag(None, "one table only", choices=("faults", "clean"))
    match: str = flag("", "regular expression of the names of faults or clean runs", metavar="PATTERN")
    output: str = flag(
        str(ROOT / "benchmarks/results/verify.json"),
        "file to write the results to; those of a table that is not made are kept",
        metavar="FILE",
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(description=__doc__)
    add_flags(parser, BenchmarkConfig, "benchmark")
    config = make_config(BenchmarkConfig, vars(parser.parse_args(argv)))
    output = Path(config.output)
    results: dict[str, Any] = json.loads(output.read_text()) if output.exists() else {}
    words = list(sys.argv[1:] if argv is None else argv)
    for name, table in (("faults", fault_rows), ("clean", clean_rows)):
        if config.only not in (None, name):
            continue
        metadata, rows = run_metadata("verify.py", words), []
        for row in table(config.match):
            rows.append(row)
            print(json.dumps(row), flush=True)
            results[name] = {**metadata, **_counts(rows), "rows": rows}
            output.write_text(json.dumps(results, indent=1) + "\n")
    return 0


def _counts(rows: list[dict[str, Any]]) -> dict[str, int]:
    """Number of rows, and of those for which each yes-or-no column is true."""
    names = [name for name, value in rows[0].items() if isinstance(value, bool)]
    return {"runs": len(rows)} | {name: sum(row[name] for row in rows) for name in names}


def fault_rows(pattern: str) -> Any:
    """Yield what the verification of each fault found. The runs of one process without a fault are shared."""
    with tempfile.TemporaryDirectory() as name:
        clean: dict[str, Verification] = {}
        for number, fault in enumerate(FAULTS):
            if re.search(pattern, fault.name):
                folder = Path(name) / str(number)
                folder.mkdir()
                yield fault_row(fault, folder, clean)


def fault_row(fault: Fault, folder: Path, clean: dict[str, Verification]) -> dict[str, Any]:
    small = _shrunk(RUNS[fault.run])
    begin = functools.partial(start, fault)
    verification = Verification(small, [small.layout], folder, begin, lambda check: None)
    if not fault.everywhere:
        if fault.run in clean:
            verification.references = clean[fault.run].references
        clean[fault.run] = verification
    checks = verification.run(quick=False)
    failed = next((check for check in checks if not check.passed), None)
    finding = "" if failed is None else str(failed.finding or failed.error)
    where = None if failed is None else failed.finding
    located = where is not None and bool(
        re.search(fault.module, f"{where.what} of {where.module}") and re.search(fault.kind, where.pattern)
    )
    return {
        "fault": fault.name,
        "like": fault.like,
        "layout": fault.run,
        "caught": where is not None,
        "crashed": failed is not None and where is None,
        "located": located,
        "in": "" if failed is None else failed.name,
        "finding": finding,
    }


def clean_rows(pattern: str) -> Any:
    """Yield a row for each comparison of a run without faults."""
    for name, flags in CLEAN.items():
        if not re.search(pattern, name):
            continue
        small = _shrunk(f"{flags} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", 4)
        with tempfile.TemporaryDirectory() as folder:
            begin = functools.partial(start, None)
            verification = Verification(small, CLEAN_LAYOUTS, Path(folder), begin, lambda check: None)
            for check in verification.run(quick=False):
                yield clean_row(name, check)


def clean_row(name: str, check: Check) -> dict[str, Any]:
    return {
        "run": name,
        "check": check.name,
        "covered": not check.not_covered,
        "alarm": not check.passed,
        "comparisons": check.compared,
        "largest of its bound": round(check.largest, 3),
        "finding": str(check.finding or check.error or check.not_covered),
    }


def _shrunk(flags: str, processes: int = 2) -> Shrunk:
    run = parse("pretrain_gpt", f"{COMMON} {flags}".split())
    return shrink(run, processes, processes, STEPS)


def start(fault: Fault | None, run: Any, processes: int, spread: Any, log: Path) -> Failure | None:
    """Run a configuration with a fault; in one process only if the fault acts there."""
    acts = fault if fault is not None and (fault.everywhere or processes > 1) else None
    return launch(train, processes, (acts, "pretrain_gpt", command_words(run), spread), log, timeout=240)


def train(fault: Fault | None, *arguments: Any) -> None:
    if fault is not None:
        mutate(fault)
    train_rank(*arguments)


if __name__ == "__main__":
    run_command(main)
