"""Mutation testing: put faults into the code, one at a time, and count those that the tests detect.

    python tests/mutate.py --count 100 --seed 1 --jobs 2 --results mutations.jsonl
    python tests/mutate.py --retry --results mutations.jsonl         # test the undetected faults again
    python tests/mutate.py --summary --results mutations.jsonl

A fault changes one line: a reduction is dropped or runs over another group; a wait, sync, rename or other call is
missing; a bound is off by one; a check is weaker; a seed differs. It is put into a copy of the checkout, where the test
files that cover the module run until one fails. Tests that fail without the fault too are left out.

Each result is appended to the results file at once, so that an interrupted run can be continued. Mark a fault that does
not change behavior with --equivalent ID "why".
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib.util
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mutation.concerns import concerned
from mutation.places import Mutation, mutations, parses
from mutation.runner import Copy, Outcome

ROOT = Path(__file__).resolve().parent.parent
# Areas that get twice as many faults as others, since a fault there ruins a training run.
CORE = ("checkpoint", "data", "model", "ops", "optim", "parallel", "training")
# Files whose code needs a GPU, and those whose tests need a package.
EXCLUDED = ("megatron/performance/cuda_graph.py",)
NEEDED = {"megatron/evaluation/harness.py": "lm_eval"}


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    args = parse(arguments)
    results = Results(Path(args.results))
    if args.equivalent is not None:
        results.add({"id": args.equivalent[0], "equivalent": args.equivalent[1]})
    elif not args.summary:
        found = all_mutations(root, args.areas)
        if args.retry:
            chosen = [m for m in found if results.by_id.get(m.id, {}).get("outcome") == "passed"]
        else:
            chosen = list(itertools.islice(choose(found, args.seed, root), args.count))
            chosen = [m for m in chosen if m.id not in results.by_id]
        Workers(results, root, jobs=args.jobs, limit=args.limit).run(chosen)
    print(results.summary())
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--count", type=int, default=100, help="number of faults (default: 100)")
    parser.add_argument(
        "--seed", type=int, default=1, help="seed of the random choice of faults (default: 1)"
    )
    parser.add_argument(
        "--areas", nargs="+", help="packages of megatron/, or base for its own modules (default: all)"
    )
    parser.add_argument(
        "--limit", type=float, default=3600, help="seconds for the tests of one fault (default: 3600)"
    )
    parser.add_argument("--jobs", type=int, default=1, help="faults tested at the same time (default: 1)")
    parser.add_argument(
        "--results", default="mutations.jsonl", help="results file (default: mutations.jsonl)"
    )
    parser.add_argument("--retry", action="store_true", help="test undetected faults again")
    parser.add_argument("--summary", action="store_true", help="print the summary of the results file")
    parser.add_argument(
        "--equivalent", nargs=2, metavar=("ID", "REASON"), help="mark a fault that does not change behavior"
    )
    return parser.parse_args(arguments)


def all_mutations(root: Path, areas: Sequence[str] | None) -> list[Mutation]:
    """All mutations of the named packages, or of all packages."""
    listed = subprocess.run(
        ["git", "ls-files", "megatron/*.py"], cwd=root, check=True, capture_output=True, text=True
    )
    lacking = [file for file, package in NEEDED.items() if importlib.util.find_spec(package) is None]
    files = [file for file in listed.stdout.split() if file not in (*EXCLUDED, *lacking)]
    found = [m for file in files for m in mutations(file, (root / file).read_text(encoding="utf-8"))]
    known = {mutation.area for mutation in found}
    if unknown := set(areas or ()) - known:
        sys.exit(f"error: --areas: there is no {min(unknown)}; there are {', '.join(sorted(known))}")
    return [mutation for mutation in found if areas is None or mutation.area in areas]


def choose(found: Sequence[Mutation], seed: int, root: Path) -> Iterator[Mutation]:
    """Yield mutations in random order, alternating between areas and, within an area, between kinds."""
    by_area: dict[str, dict[str, list[Mutation]]] = {}
    for mutation in found:
        by_area.setdefault(mutation.area, {}).setdefault(mutation.kind, []).append(mutation)
    turns = [area for area in sorted(by_area) for _ in range(2 if area in CORE else 1)]
    draw = random.Random(seed)
    draw.shuffle(turns)
    rows: dict[str, Iterator[Mutation]] = {}
    for area, by_kind in sorted(by_area.items()):
        kinds = [draw.sample(same, len(same)) for _, same in sorted(by_kind.items())]
        draw.shuffle(kinds)
        by_turns = itertools.chain.from_iterable(itertools.zip_longest(*kinds))
        rows[area] = (m for m in by_turns if m and parses(m, (root / m.path).read_text(encoding="utf-8")))
    while turns:
        for area in list(turns):
            mutation = next(rows[area], None)
            if mutation is None:
                turns = [other for other in turns if other != area]
            else:
                yield mutation


class Results:
    """The results file. The last of several lines for the same fault counts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.by_id: dict[str, dict[str, Any]] = {}
        self.seconds: dict[str, float] = {}  # longest time of each test file
        self.lock = threading.Lock()
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        for line in text.splitlines():
            with contextlib.suppress(json.JSONDecodeError):  # incomplete line of a run that was killed
                self._take(json.loads(line))
        if text and not text.endswith("\n"):
            path.write_text(text + "\n", encoding="utf-8")

    def _take(self, row: dict[str, Any]) -> None:
        self.by_id[row["id"]] = self.by_id.get(row["id"], {}) | row
        for file, seconds in row.get("of files", {}).items():
            self.seconds[file] = max(seconds, self.seconds.get(file, 0.0))

    def add(self, row: dict[str, Any]) -> None:
        with self.lock, self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            self._take(row)

    def quickest_first(self, tests: Sequence[str]) -> list[str]:
        """Sort test files by their time in earlier runs; the first, and those without a time, keep their places."""
        known = iter(
            sorted((test for test in tests[1:] if test in self.seconds), key=lambda test: self.seconds[test])
        )
        return [*tests[:1], *(next(known) if test in self.seconds else test for test in tests[1:])]

    @property
    def counted(self) -> list[dict[str, Any]]:
        return [row for row in self.by_id.values() if "equivalent" not in row]

    def summary(self) -> str:
        """List the undetected faults, and the counts by area."""
        lines, total, noticed = [], collections.Counter(), collections.Counter()
        for row in self.counted:
            total[row["area"]] += 1
            noticed[row["area"]] += row["outcome"] != "passed"
            if row["outcome"] == "passed":
                lines.append(f"{row['id']}  not noticed by {row['files']} test files\n{row['diff']}\n")
        for area in sorted(total):
            lines.append(f"{area:14} {noticed[area]:4} of {total[area]:4} noticed")
        lines.append(f"{'all':14} {_share(noticed.total(), total.total())}")
        timed_out = [row for row in self.counted if row["outcome"] == "timed out"]
        if timed_out:
            lines.append(f"{len(timed_out)} of them by hanging: {', '.join(row['id'] for row in timed_out)}")
        if len(self.by_id) > len(self.counted):
            lines.append(f"{len(self.by_id) - len(self.counted)} more change nothing, and do not count")
        return "\n".join(lines)


def _share(noticed: int, total: int) -> str:
    return f"{noticed:4} of {total:4} noticed" + (f" ({noticed / total:.0%})" if total else "")


class Workers:
    """Tests mutations, each in one of several copies of the checkout."""

    def __init__(self, results: Results, root: Path, *, jobs: int, limit: float) -> None:
        self.results, self.root, self.jobs, self.limit = results, root, jobs, limit
        self.stop = threading.Event()
        self.passes_unmutated: dict[str, bool] = {}  # for each test that failed with a fault

    def run(self, chosen: Sequence[Mutation]) -> None:
        waiting, begin, numbers = iter(chosen), time.monotonic(), itertools.count(1)
        lock = threading.Lock()

        def work(copy: Copy) -> None:
            while not self.stop.is_set():
                with lock:
                    mutation = next(waiting, None)
                row = None if mutation is None else self.one(mutation, copy)
                if mutation is None or row is None:
                    return
                self.results.add(row)
                number = next(numbers)
                left = (time.monotonic() - begin) / number * (len(chosen) - number)
                verdict = "NOT NOTICED" if row["outcome"] == "passed" else f"{row['outcome']} {row['test']}"
                print(
                    f"[{number}/{len(chosen)}, {left / 60:.0f} min left] {mutation.path}:{mutation.line} "
                    f"{mutation.kind}: {verdict} ({row['seconds']:.0f} s)",
                    flush=True,
                )

        with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
            cores = max(1, (os.cpu_count() or 1) // self.jobs)
            copies = [
                Copy(self.root, Path(folder, str(i)), cores) for i in range(min(self.jobs, len(chosen)))
            ]
            threads = [threading.Thread(target=work, args=(copy,)) for copy in copies]
            for thread in threads:
                thread.start()
            try:
                for thread in threads:
                    thread.join()
            except KeyboardInterrupt:
                print("interrupted; run the same command to continue", file=sys.stderr)
            finally:
                self.stop.set()
                for thread in threads:
                    thread.join()

    def one(self, mutation: Mutation, copy: Copy) -> dict[str, Any] | None:
        """Result of a mutation; None if the run was interrupted."""
        tests = self.results.quickest_first(concerned(mutation.path, copy.root))
        outcome = Outcome("failed", "", 0.0, {})
        while outcome.kind == "failed":
            without = [test for test, passes in self.passes_unmutated.items() if not passes]
            with copy.mutated(mutation):
                outcome = copy.test(tests, without=without, limit=self.limit, stop=self.stop)
            if outcome.kind != "failed" or self.passes(outcome.test, copy):
                break
        if self.stop.is_set():
            return None
        row = {"id": mutation.id, "area": mutation.area, "kind": mutation.kind, "diff": mutation.diff}
        row |= {"outcome": outcome.kind, "test": outcome.test, "seconds": round(outcome.elapsed, 1)}
        return row | {"files": len(tests), "of files": outcome.seconds}

    def passes(self, test: str, copy: Copy) -> bool:
        """True if a test passes without the fault, so that its failure is due to the fault."""
        if test not in self.passes_unmutated:
            selected = [test] if "::" in test else ["--collect-only", test or "tests"]
            found = copy.test(selected, without=(), limit=self.limit, stop=self.stop)
            self.passes_unmutated[test] = found.kind != "failed"
            if found.kind == "failed" and not test:
                sys.exit(
                    "error: without a fault, too, pytest cannot read the tests of a clone of this checkout"
                )
            if found.kind == "failed":
                print(f"{test} fails without a fault, too, and is left out", flush=True)
        return self.passes_unmutated[test]


if __name__ == "__main__":
    sys.exit(main())
