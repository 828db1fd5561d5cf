"""Run tests on copies of the checkout, with and without a fault."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree

from mutation.places import Mutation


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Outcome of a run of tests.

    Attributes:
        kind: "passed", "failed", "timed out" or "stopped".
        test: first test that failed, or file that could not be imported.
        elapsed: seconds of the whole run.
        seconds: seconds of each test file; empty if the run timed out or was stopped.
    """

    kind: str
    test: str
    elapsed: float
    seconds: dict[str, float]


class Copy:
    """Clone of the checkout, including uncommitted changes, to which mutations are applied."""

    def __init__(self, root: Path, folder: Path, cores: int) -> None:
        """Clone into `folder`, which must not exist. Links the folder `shared` beside the checkout, if there is one."""
        self.root = folder / "checkout"
        folder.mkdir()
        if (root.parent / "shared").is_dir():
            (folder / "shared").symlink_to(root.parent / "shared")
        subprocess.run(["git", "clone", "-q", "--shared", str(root), str(self.root)], check=True)
        changes = subprocess.run(
            ["git", "diff", "--binary", "HEAD"], cwd=root, check=True, capture_output=True
        )
        if changes.stdout:
            subprocess.run(["git", "apply", "-"], cwd=self.root, input=changes.stdout, check=True)
        self.environment = os.environ | {
            "PYTHONPATH": str(self.root),
            "OMP_NUM_THREADS": str(cores),
            "MKL_NUM_THREADS": str(cores),
            "TOKENIZERS_PARALLELISM": "false",
        }

    def test(
        self, selected: Sequence[str], *, without: Sequence[str], limit: float, stop: threading.Event
    ) -> Outcome:
        """Run test files or single tests until one fails.

        Args:
            without: tests to leave out.
            limit: seconds after which the run is aborted.
            stop: aborts the run once set.
        """
        report = self.root.parent / "report.xml"
        report.unlink(missing_ok=True)
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-p",
            "no:cacheprovider",
            "--tb=no",
            f"--junit-xml={report}",
        ]
        command += [*(f"--deselect={test}" for test in without), *selected]
        begin = time.monotonic()
        process = subprocess.Popen(
            command,
            cwd=self.root,
            env=self.environment,
            stdout=(self.root.parent / "output").open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that the processes of the tests can be killed too
        )
        ended = ""
        while process.poll() is None and not ended:
            if stop.wait(0.1):
                ended = "stopped"
            elif time.monotonic() - begin > limit:
                ended = "timed out"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        elapsed = time.monotonic() - begin
        if ended:
            return Outcome(ended, "", elapsed, {})
        # 5: no tests were collected, for example because all need a GPU.
        kind = "passed" if process.returncode in (0, 5) else "failed"
        return Outcome(kind, _failed(self.root.parent / "output"), elapsed, _seconds(report))

    @contextlib.contextmanager
    def mutated(self, mutation: Mutation) -> Iterator[None]:
        """Context in which the copy has the mutation."""
        path = self.root / mutation.path
        source = path.read_text(encoding="utf-8")
        try:
            self._write(path, mutation.apply(source))
            yield
        finally:
            self._write(path, source)

    @staticmethod
    def _write(path: Path, source: str) -> None:
        path.write_text(source, encoding="utf-8")
        # Python compares mtime, in whole seconds, and size. A fault may change neither.
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
            compiled.unlink()


def _failed(output: Path) -> str:
    """First test that failed or file that could not be read, in pytest's output."""
    found = re.search(r"^(?:FAILED|ERROR) (\S.*?)(?: - |$)", output.read_text(errors="replace"), re.MULTILINE)
    return found[1] if found else ""


def _seconds(report: Path) -> dict[str, float]:
    """Seconds by test file, from the JUnit report."""
    found: collections.Counter[str] = collections.Counter()
    if report.is_file():
        for case in ElementTree.parse(report).iter("testcase"):
            found[case.get("classname", "").replace(".", "/") + ".py"] += float(case.get("time", 0))
    return dict(found)
