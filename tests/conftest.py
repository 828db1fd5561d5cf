"""Fixtures shared by all tests."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import megatron.plugins

ROOT = Path(__file__).resolve().parent.parent

# A shell starts background jobs with Ctrl-C ignored, and so would be every process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def sigterm() -> Iterator[None]:
    """Of a tool that runs within a test's process, nothing is left afterwards of how it meets SIGTERM."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real text, vocabularies and reference numbers beside the checkout; skips without it."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip("needs ../shared (real text, vocabularies and reference numbers)")
    return folder


@pytest.fixture(scope="session")
def command() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a Python command of the repository, `command("tools/x.py", "--flag", 1)`, and gives its output.

    With `replicas` it is started by torchrun as that many processes; with `status` (default 0) it must end so.
    """

    def run(*words: object, replicas: int = 1, status: int = 0) -> subprocess.CompletedProcess[str]:
        launch = ["-m", "torch.distributed.run", f"--nproc-per-node={replicas}"] if replicas > 1 else []
        arguments = [sys.executable, *launch, *map(str, words)]
        result = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True)
        assert result.returncode == status, result.stdout + result.stderr
        return result

    return run


@pytest.fixture
def pretrain(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs pretrain_gpt.py within the test's process, which is faster; gives what it printed."""

    def run(*flags: object) -> str:
        from megatron.arguments import parse_run_config
        from pretrain_gpt import DEFAULTS, GPT

        config = parse_run_config([str(flag) for flag in flags], description="", defaults=DEFAULTS)
        assert megatron.plugins.run(config, GPT) == 0
        return capsys.readouterr().out

    return run
