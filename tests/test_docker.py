"""Static checks of the Dockerfiles: the README's steps, run by an unprivileged user."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
FILES = ["Dockerfile", "docker/cuda.Dockerfile"]
KNOWN = {"ARG", "CMD", "COPY", "ENV", "FROM", "RUN", "USER", "WORKDIR"}


def instructions(path: str) -> list[tuple[str, str]]:
    """Return (name, rest) of each instruction, without comments and with continuation lines joined."""
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    text = "\n".join(line for line in lines if not line.startswith("#"))
    joined = re.sub(r"\\\n\s*", "", text).splitlines()
    return [tuple(line.split(maxsplit=1)) for line in joined if line.strip()]


@pytest.mark.parametrize("path", FILES)
def test_instructions_are_in_order(path: str) -> None:
    found = instructions(path)
    assert {name for name, _ in found} <= KNOWN
    names = [name for name, _ in found]
    assert set(names[: names.index("FROM")]) <= {"ARG"}
    stages: set[str] = set()
    for name, rest in found:
        if name == "FROM":
            image, *alias = re.fullmatch(r"(\S+)(?: AS (\w+))?", rest).groups()
            assert image in stages or re.search(r":[\w.${}-]*\d", image) or "${" in image  # pinned version
            stages |= {a for a in alias if a}
    for name in (rest.split("=")[0] for kind, rest in found if kind == "ARG"):
        assert any(f"${name}" in rest or f"${{{name}}}" in rest for kind, rest in found if kind != "ARG")


@pytest.mark.parametrize("path", FILES)
def test_root_only_installs_packages_and_adds_the_user(path: str) -> None:
    found = instructions(path)
    user = [name for name, _ in found].index("USER")
    assert found[user][1] == "user" and [name for name, _ in found].count("USER") == 1
    as_root = " && ".join(rest for name, rest in found[:user] if name == "RUN").split(" && ")
    assert all(re.match(r"apt-get (update|install)|rm -rf /var/lib/apt/lists|useradd ", c) for c in as_root)
    number = re.search(r"useradd .*--uid (\d+) user", " ".join(as_root))[1]
    assert f"runAsUser: {number}\n" in (ROOT / "scripts/k8s/pretrain.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", FILES)
def test_nccl_finds_infiniband(path: str) -> None:
    """Without these libraries and the adapters' drivers NCCL falls back to TCP."""
    as_root = " && ".join(rest for name, rest in instructions(path) if name == "RUN").split(" && ")
    packages = {
        word for command in as_root if command.startswith("apt-get install ") for word in command.split()
    }
    assert {"libibverbs1", "librdmacm1", "ibverbs-providers"} <= packages


def test_containers_may_lock_memory() -> None:
    """InfiniBand registers memory that must not be swapped out."""
    manifest = yaml.safe_load((ROOT / "scripts/k8s/pretrain.yaml").read_text(encoding="utf-8"))
    for replica in manifest["spec"]["pytorchReplicaSpecs"].values():
        for container in replica["template"]["spec"]["containers"]:
            assert "IPC_LOCK" in container["securityContext"]["capabilities"]["add"]
    page = (ROOT / "docs/launching.md").read_text(encoding="utf-8")
    commands = re.findall(r"^ +docker run .*--ipc host.*", page, re.M)
    assert commands and all("--ulimit memlock=-1" in command for command in commands)


@pytest.mark.parametrize("path", FILES)
def test_steps_of_the_user_are_in_the_readme(path: str) -> None:
    readme = re.sub(r"@\w+\"", '@$APEX"', (ROOT / "README.md").read_text(encoding="utf-8"))
    found = instructions(path)
    steps = [rest for name, rest in found[[name for name, _ in found].index("USER") :] if name == "RUN"]
    steps = [re.sub(r'^\[ -z "\$APEX" \] \|\| ', "", step) for step in steps if not step.startswith("mkdir")]
    steps += [" ".join(json.loads(rest)) for name, rest in found if name == "CMD"]
    assert "python3 -m venv .venv" in steps and "bash scripts/pretrain_gpt.sh" in steps
    for step in steps:
        assert re.search(rf"^{re.escape(step)}( |$)", readme, re.M), step


def test_apex_is_a_commit_that_the_workflow_builds() -> None:
    """No release of apex compiles with the CUDA of the image: 25.09 asks its compiler for GPUs that it has dropped."""
    assert re.search(r"NVIDIA/apex@[0-9a-f]{40}\b", (ROOT / "README.md").read_text(encoding="utf-8"))
    workflow = (ROOT / ".github/workflows/containers.yml").read_text(encoding="utf-8")
    assert "'NVIDIA/apex@\\K\\w+' README.md" in workflow and '--build-arg "APEX=$commit"' in workflow


@pytest.mark.parametrize("path", FILES)
def test_copied_files_exist_and_commands_parse(path: str) -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    for name, rest in instructions(path):
        if name == "COPY":
            owner, *sources, _ = rest.split()
            assert owner == "--chown=user"
            assert all((ROOT / source).exists() and source not in ignored for source in sources)
        if name == "RUN":
            assert subprocess.run(["sh", "-n", "-c", rest]).returncode == 0
    assert {".git", ".venv"} <= set(ignored)


def commands_in_containers() -> list[list[str]]:
    """Arguments of Python, or of torchrun with two processes, in each command that the workflow runs in an image."""
    text = (ROOT / ".github/workflows/containers.yml").read_text(encoding="utf-8")
    flags = yaml.safe_load(text)["env"]["RUN"]
    found = re.findall(r"docker run --rm megatron\S* (?:python|torchrun) (.*)", text.replace("$RUN", flags))
    return [line.split() for line in found if not line.startswith("-c ")]


@pytest.mark.slow
def test_commands_in_containers(command: Callable) -> None:
    """The workflow's commands run here too, without the images."""
    commands = {tuple(words) for words in commands_in_containers()}
    assert len(commands) == 5
    for first, *words in commands:
        replicas, words = (2, words[1:]) if first == "--nproc-per-node" else (1, [first, *words])
        assert (
            "iterations" in command(*words, replicas=replicas).stdout
            or "--version" in words
            or "--dry-run" in words
        )
