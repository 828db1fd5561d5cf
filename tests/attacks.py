"""Attack the program: kill runs at random moments, and damage the files that it reads.

    python tests/attacks.py kills --count 200 --seed 0 --results kills.jsonl
    python tests/attacks.py files --count 400 --seed 0 --results files.jsonl
    python tests/attacks.py files --summary --results files.jsonl

kills: small runs on a CPU, of one or two processes, are killed by SIGKILL at random moments, half of the times while
they save, and started again with the same command. When a run has ended, its metrics and weights must be bit for bit
those of a run that was not disturbed.

files: a file of each kind is damaged, and the command that reads it runs in a forked process. Outcomes:

    refused     one line that begins with error:, and a status other than 0
    harmless    status 0 and the result of the undamaged file
    changed     status 0 and another result, from a file without checksums: another text, another weight
    silent      status 0 and another result, from a file with checksums                               (a failure)
    traceback, memory, hang, crash, unclear                                                           (failures)

Each outcome is appended to the results file at once, so that an interrupted command can be continued by repeating it.
The status is 1 if there are failures.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from attack import files, kills  # noqa: E402, after the variables that torch reads

# For each kind of attack its preparation, one attack, and the outcomes that are failures.
KINDS = {
    "kills": (kills.prepare, kills.attack, kills.FAILURES),
    "files": (files.prepare, files.attack, files.FAILURES),
}


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    prepare, attack, failures = KINDS[args.kind]
    results = Results(Path(args.results or f"{args.kind}.jsonl"), args.seed, failures)
    if not args.summary:
        with tempfile.TemporaryDirectory(prefix="attacks-") as name:
            folder = Path(name)
            try:
                prepare(folder)
                for number in args.only or range(args.count):
                    if args.only or number not in results.rows:
                        row = attack(number, args.seed, folder)
                        results.add(row)
                        print(f"attack {number} of {args.count}: {shown(row)}", flush=True)
            except KeyboardInterrupt:
                print("interrupted; run the same command to continue", file=sys.stderr)
    print(results.summary())
    return 1 if results.failed else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("kind", choices=KINDS, help="what to attack")
    parser.add_argument("--count", type=int, default=100, help="number of attacks (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the attacks (default: 0)")
    parser.add_argument("--results", help="results file (default: kills.jsonl or files.jsonl)")
    parser.add_argument(
        "--only", type=int, nargs="+", metavar="N", help="repeat only these attacks, from 0 on"
    )
    parser.add_argument("--summary", action="store_true", help="print the summary of the results file")
    return parser.parse_args(arguments)


def shown(row: dict[str, Any]) -> str:
    return f"{row['outcome']:9} {row['attack']}: {row['says'][:200]}"


class Results:
    """The results file: a JSON object per attack, of which the last counts."""

    def __init__(self, path: Path, seed: int, failures: Sequence[str]) -> None:
        self.path, self.seed, self.failures = path, seed, failures
        self.rows: dict[int, dict[str, Any]] = {}
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        for line in text.splitlines():
            with contextlib.suppress(json.JSONDecodeError):  # incomplete line of a command that was killed
                row = json.loads(line)
                if row["seed"] == seed:
                    self.rows[row["number"]] = row
        if text and not text.endswith("\n"):
            path.write_text(text + "\n", encoding="utf-8")

    def add(self, row: dict[str, Any]) -> None:
        row = {"seed": self.seed} | row
        self.rows[row["number"]] = row
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    @property
    def failed(self) -> list[dict[str, Any]]:
        return [row for row in self.rows.values() if row["outcome"] in self.failures]

    def summary(self) -> str:
        """List the failures and the number of attacks with each outcome."""
        lines = [f"attack {row['number']}: {shown(row)}" for row in self.failed]
        counts = collections.Counter(row["outcome"] for row in self.rows.values())
        lines += [f"{outcome:9} {count:4}" for outcome, count in counts.most_common()]
        kills = sum(row.get("kills", 0) for row in self.rows.values())
        return "\n".join(
            [
                *lines,
                f"{len(self.rows)} attacks, {len(self.failed)} failed"
                + (f", {kills} kills" if kills else ""),
            ]
        )


if __name__ == "__main__":
    sys.exit(main())
