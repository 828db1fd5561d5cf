"""Fixtures shared by all tests."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path

import pytest
from distributed import PRELOAD

import megatron.plugins

ROOT = Path(__file__).resolve().parent.parent

# A shell starts background jobs with SIGINT ignored, and the processes that a test starts would inherit this.
signal.signal(signal.SIGINT, signal.default_int_handler)

_set_preload = forkserver.set_forkserver_preload


def _preload_all(modules: list[str]) -> None:
    """Preload what any test's processes need: a worker has one fork server, which any of its tests may start."""
    _set_preload([*modules, *(module for module in PRELOAD if module not in modules)])


forkserver.set_forkserver_preload = _preload_all


@pytest.fixture(autouse=True)
def sigterm() -> Iterator[None]:
    """Restore the SIGTERM handler, since a tool that runs in the test's process may replace it."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="session")
def shared() -> Path:
    """Path of the folder of real text, vocabularies and reference numbers next to the checkout; skips without it."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip("needs ../shared (real text, vocabularies and reference numbers)")
    return folder


@pytest.fixture(scope="session")
def command() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a Python command of the repository, `command("tools/x.py", "--flag", 1)`, and return its result.

    With `replicas` > 1 the command runs under torchrun. `status` is the expected exit status.
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
    """Run pretrain_gpt.py in the test's process, which is faster, and return its stdout."""

    def run(*flags: object) -> str:
        from megatron.arguments import parse_run_config
        from megatron.pretrain_gpt import DEFAULTS, GPT

        config = parse_run_config([str(flag) for flag in flags], description="", defaults=DEFAULTS)
        assert megatron.plugins.run(config, GPT) == 0
        return capsys.readouterr().out

    return run
