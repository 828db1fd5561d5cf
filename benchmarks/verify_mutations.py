"""Faults drawn at random over the code that a verified run executes, for `benchmarks/verify.py`."""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Iterator, Mapping, Set
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from mutation.places import Mutation, mutations, parses

# Kinds of faults of `mutation.places` that change a reduction, a slice, a seed, a mask or a state.
KINDS = (
    "dropped reduction",
    "rescaled reduction",
    "permuted reduction",
    "another group",
    "another seed",
    "missing wait",
    "missing assignment",
    "missing call",
    "off by one",
    "min for max",
)
PACKAGES = ("checkpoint", "data", "model", "ops", "optim", "parallel", "training")


@dataclasses.dataclass(frozen=True)
class RandomFault:
    """A mutation, and the run that executes its line.

    Attributes:
        run: key of `RUNS` in verify_runs.py.
    """

    mutation: Mutation
    run: str

    @property
    def name(self) -> str:
        return self.mutation.diff

    def put_into(self, root: Path) -> None:
        """Put the fault into the checkout `root`."""
        path = root / self.mutation.path
        path.write_text(self.mutation.apply(path.read_text(encoding="utf-8")), encoding="utf-8")


def random_faults(executed: Mapping[str, Set[tuple[str, int]]], seed: int) -> Iterator[RandomFault]:
    """Yield faults in random order, by turns of their kinds.

    Args:
        executed: files and lines that each run of `RUNS` executes.
    """
    draw = random.Random(seed)
    by_kind: dict[str, list[RandomFault]] = {kind: [] for kind in KINDS}
    for path in sorted({path for lines in executed.values() for path, _ in lines}):
        if path.split("/")[1] not in PACKAGES:
            continue
        source = (ROOT / path).read_text(encoding="utf-8")
        for mutation in mutations(path, source):
            runs = [run for run, lines in executed.items() if (path, mutation.line) in lines]
            if mutation.kind in KINDS and runs and parses(mutation, source):
                by_kind[mutation.kind].append(RandomFault(mutation, draw.choice(runs)))
    rows = [draw.sample(faults, len(faults)) for faults in by_kind.values()]
    while any(rows):
        for row in rows:
            if row:
                yield row.pop()
