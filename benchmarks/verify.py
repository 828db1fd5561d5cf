"""Count the faults that `megatron verify` finds, and its false alarms.

    python benchmarks/verify.py [--only faults|random|clean] [--match PATTERN]

"faults" puts one fault after the other into a copy of the checkout (`verify_faults.py`, `verify_mixture_faults.py`,
`verify_packing_faults.py`, `verify_context_faults.py`), and verifies a small run of it against one process of the
program without the fault. A fault is caught if a comparison fails, and located if the finding names the right kind of
tensor, module and kind of fault. "random" does the same with faults drawn at random over the lines that the runs
execute (`verify_mutations.py`); those that stop the run are not counted. Whether their findings are right, and why one
that is not caught is harmless, is judged by hand (`verify_judgments.json`). "clean" verifies random combinations of
features without a fault in six layouts and three resumes. Results are written after each run; a table that was
interrupted continues.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from parallel import run_metadata
from verify_context_faults import CONTEXT_FAULTS
from verify_faults import FAULTS, Fault
from verify_mixture_faults import MIXTURE_FAULTS
from verify_mutations import RandomFault, random_faults
from verify_packing_faults import PACKING_FAULTS
from verify_runs import (
    CONTEXT_RUNS,
    COUNTS,
    LAYOUTS,
    MIXTURE_RUNS,
    PACKING_RUNS,
    RUNS,
    combinations,
    shrunk,
)

from megatron.cli import Parser, add_flags, make_config, run_command
from megatron.commands.verify import train_rank
from megatron.errors import TrainingFault
from megatron.flags import Config, flag
from megatron.training.config import RunConfig
from megatron.verify.compare import Comparer
from megatron.verify.launch import Failure, launch
from megatron.verify.runner import Check, Runs, Verification
from megatron.verify.shrink import command_words, in_layout

# Seconds for the ranks of one run.
TIMEOUT = 180
# Random faults that are counted.
NUM_RANDOM = 40


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkConfig(Config):
    """Options of the benchmark."""

    only: str | None = flag(None, "one table only", choices=("faults", "random", "clean"))
    match: str = flag("", "regular expression of the names of faults or clean runs", metavar="PATTERN")
    seed: int = flag(1, "seed of random faults and of clean runs", low=0)
    output: str = flag(
        str(ROOT / "benchmarks/results/verify.json"),
        "file to write the results to; tables that are not made keep their results",
        metavar="FILE",
    )


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    parser = Parser(description=__doc__)
    add_flags(parser, BenchmarkConfig, "benchmark")
    config = make_config(BenchmarkConfig, vars(parser.parse_args(words)))
    for name, table in (("faults", fault_rows), ("random", random_rows), ("clean", clean_rows)):
        if config.only in (None, name):
            make_table(name, table, config, words)
    return 0


def make_table(name: str, table: Any, config: BenchmarkConfig, words: list[str]) -> None:
    """Add rows to a table of the results, those that it has from this commit left out."""
    output = Path(config.output)
    results: dict[str, Any] = json.loads(output.read_text()) if output.exists() else {}
    metadata = run_metadata("verify.py", words)
    old = results.get(name, {})
    same = old.get("commit") == metadata["commit"] and old.get("seed") == config.seed
    rows: list[dict[str, Any]] = old["rows"] if same else []
    with tempfile.TemporaryDirectory() as folder:
        for row in table(config, rows, Path(folder)):
            rows.append(row)
            print(json.dumps(row), flush=True)
            results[name] = {**metadata, "seed": config.seed, **_counts(rows), "rows": rows}
            output.write_text(json.dumps(results, indent=1) + "\n")


def _counts(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Number of rows, those for which each yes-or-no column is true, and in clean runs those of each precision."""
    names = [name for name, value in rows[0].items() if isinstance(value, bool)]
    counts: dict[str, Any] = {"runs": len(rows)} | {name: sum(row[name] for row in rows) for name in names}
    for precision in sorted({row["precision"] for row in rows if "precision" in row}):
        covered = [row for row in rows if row["precision"] == precision and row["covered"]]
        counts[precision] = {"covered": len(covered), "alarm": sum(row["alarm"] for row in covered)}
    return counts


class Checkout:
    """A copy of the checkout, in which runs of several processes have a fault."""

    def __init__(self, folder: Path) -> None:
        self.root, self.folder = folder / "checkout", folder
        self.references: dict[str, dict[bool, Comparer]] = {}
        subprocess.run(["git", "clone", "-q", "--shared", str(ROOT), str(self.root)], check=True)
        self.number = 0

    def verify(self, fault: Fault | RandomFault) -> Check | None:
        """Put a fault in, and verify. Returns the first check that failed, if any."""
        everywhere = isinstance(fault, Fault) and fault.everywhere
        small = shrunk((RUNS | MIXTURE_RUNS | PACKING_RUNS | CONTEXT_RUNS)[fault.run])
        self.number += 1
        folder = self.folder / str(self.number)
        folder.mkdir()
        start = functools.partial(self.start, everywhere)
        runs = Runs(small, [small.layout], folder, start)
        if not everywhere:
            # The runs of one process have no fault, and are shared.
            runs.comparers = self.references.setdefault(fault.run, {})
        fault.put_into(self.root)
        try:
            checks = Verification(runs, [small.layout], lambda check: None).run(quick=False)
        finally:
            subprocess.run(["git", "checkout", "-q", "."], cwd=self.root, check=True)
        return next((check for check in checks if not check.passed), None)

    def start(
        self, everywhere: bool, run: RunConfig, processes: int, spread: Any, log: Path
    ) -> Failure | None:
        """Run a configuration, in the copy if it has several processes or if the fault acts in one too."""
        flags = command_words(run)
        if processes == 1 and not everywhere:
            return launch(train_rank, 1, ("pretrain_gpt", flags, spread), log, timeout=TIMEOUT)
        return self.run(processes, {"flags": flags, "spread": spread, "lines": None}, log)

    def run(self, processes: int, words: dict[str, Any], log: Path) -> Failure | None:
        """Start `verify_rank.py` in the copy."""
        path = log.with_suffix(".json")
        path.write_text(json.dumps(words), encoding="utf-8")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(processes), "benchmarks/verify_rank.py", str(path)]
        environment = os.environ | {
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(self.root),
        }
        with log.with_suffix(".log").open("w+") as file:
            process = subprocess.Popen(
                command,
                cwd=self.root,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = process.wait(TIMEOUT)
            except subprocess.TimeoutExpired:
                return Failure(0, f"did not end within {TIMEOUT} seconds")
            finally:
                # torchrun, if it did not end by itself, and its ranks.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            file.seek(0)
            errors = [line for line in file.read().splitlines() if "rror" in line]
        return Failure(0, errors[0] if errors else f"status {status}") if status else None

    def executed(self, run: str) -> set[tuple[str, int]]:
        """Files and lines that the ranks of a run execute."""
        small = shrunk(RUNS[run])
        log = self.folder / f"lines {run}"
        words = command_words(in_layout(small, small.layout))
        failure = self.run(small.layout.processes, {"flags": words, "spread": None, "lines": str(log)}, log)
        if failure is not None:
            raise TrainingFault(f"{run}: {failure.message}")
        files = [Path(f"{log}-{rank}") for rank in range(small.layout.processes)]
        return {(path, line) for file in files for path, line in json.loads(file.read_text())}


def fault_rows(config: BenchmarkConfig, done: list[dict[str, Any]], folder: Path) -> Iterator[dict[str, Any]]:
    """Yield what the verification of each fault of the table found."""
    checkout, names = Checkout(folder), {row["fault"] for row in done}
    for fault in (*FAULTS, *MIXTURE_FAULTS, *PACKING_FAULTS, *CONTEXT_FAULTS):
        if fault.name in names or not re.search(config.match, fault.name):
            continue
        failed = checkout.verify(fault)
        finding = failed.finding if failed else None
        located = finding is not None and bool(
            re.search(fault.module, f"{finding.what} of {finding.module}")
            and re.search(fault.kind, finding.pattern)
        )
        yield {"fault": fault.name, "like": fault.like, "layout": fault.run, "located": located} | _found(
            failed
        )


def random_rows(
    config: BenchmarkConfig, done: list[dict[str, Any]], folder: Path
) -> Iterator[dict[str, Any]]:
    """Yield what the verification of each random fault found, until 40 did not stop the run."""
    checkout, names = Checkout(folder), {row["fault"] for row in done}
    judgments = json.loads((ROOT / "benchmarks/verify_judgments.json").read_text(encoding="utf-8"))
    executed = {run: checkout.executed(run) for run in RUNS}
    counted = sum(not row["crashed"] for row in done)
    for fault in random_faults(executed, config.seed):
        if counted == NUM_RANDOM:
            return
        if fault.name in names or not re.search(config.match, fault.name):
            continue
        found = _found(checkout.verify(fault))
        counted += not found["crashed"]
        judgment = {"located": False, "reason": ""} | judgments.get(fault.name, {})
        yield {"fault": fault.name, "id": fault.mutation.id, "layout": fault.run} | judgment | found


def _found(failed: Check | None) -> dict[str, Any]:
    if failed is None:
        return {"caught": False, "crashed": False, "in": "", "finding": ""}
    return {
        "caught": failed.finding is not None,
        "crashed": failed.finding is None,
        "in": failed.name,
        "finding": str(failed.finding or failed.error),
    }


def clean_rows(config: BenchmarkConfig, done: list[dict[str, Any]], folder: Path) -> Iterator[dict[str, Any]]:
    """Yield a row for each comparison of a run without faults."""
    names = {row["run"] for row in done}
    for precision in COUNTS:
        for number, (flags, small) in enumerate(combinations(precision, config.seed)):
            name = f"{precision} {number}: {flags}"
            if name in names or not re.search(config.match, name):
                continue
            runs = folder / f"{precision}-{number}"
            runs.mkdir()
            verification = Verification(Runs(small, LAYOUTS, runs, start_clean), LAYOUTS, lambda check: None)
            rows = [clean_row(precision, name, check) for check in verification.run(quick=False)]
            shutil.rmtree(runs)
            yield from rows


def start_clean(run: RunConfig, processes: int, spread: Any, log: Path) -> Failure | None:
    arguments = ("pretrain_gpt", command_words(run), spread)
    return launch(train_rank, processes, arguments, log, timeout=TIMEOUT)


def clean_row(precision: str, name: str, check: Check) -> dict[str, Any]:
    return {
        "precision": precision,
        "run": name,
        "check": check.name,
        "covered": not check.not_covered,
        "alarm": not check.passed,
        "comparisons": check.compared,
        "largest of its bound": round(check.largest, 3),
        "finding": str(check.finding or check.error or check.not_covered),
    }


if __name__ == "__main__":
    run_command(main)
