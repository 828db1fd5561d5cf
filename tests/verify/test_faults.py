"""Faults in mixtures, packed documents and context parallelism are found; findings name the tensor and ranks."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import shutil
import sys
import tempfile
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from megatron.commands.verify import train_rank
from megatron.verify.compare import Comparer
from megatron.verify.launch import Failure, launch
from megatron.verify.runner import Runs, Verification
from megatron.verify.shrink import command_words

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from verify_context_faults import CONTEXT_FAULTS  # noqa: E402
from verify_mixture_faults import MIXTURE_FAULTS, Fault  # noqa: E402
from verify_packing_faults import PACKING_FAULTS  # noqa: E402
from verify_runs import CONTEXT_RUNS, MIXTURE_RUNS, PACKING_RUNS, shrunk  # noqa: E402


def put_into_process(fault: Fault) -> None:
    """Give the fault's function in this process the code that it has with the fault."""
    module, _, names = fault.target.partition(":")
    path = Path(module.replace(".", "/") + ".py")
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / path
        target.parent.mkdir(parents=True)
        shutil.copy(ROOT / path, target)
        fault.put_into(Path(folder))
        code = compile(target.read_text(encoding="utf-8"), str(path), "exec")
    function: Any = importlib.import_module(module)
    for name in names.split("."):
        function = getattr(function, name)
        code = next(c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == name)
    inspect.unwrap(function).__code__ = code


def train_with_fault(fault: Fault, *arguments: Any) -> None:
    put_into_process(fault)
    train_rank(*arguments)


def start(fault: Fault, run: Any, processes: int, spread: Any, log: Path) -> Failure | None:
    """Start a run, with the fault if it has several processes."""
    arguments = ("pretrain_gpt", command_words(run), spread)
    if processes == 1:
        return launch(train_rank, 1, arguments, log, timeout=240)
    return launch(train_with_fault, processes, (fault, *arguments), log, timeout=240)


@pytest.fixture(scope="module")
def references() -> dict[str, dict[bool, Comparer]]:
    return {}


@pytest.mark.slow  # test_verify.py has one that runs by default
@pytest.mark.parametrize(
    "fault", (*MIXTURE_FAULTS, *PACKING_FAULTS, *CONTEXT_FAULTS), ids=lambda fault: fault.name
)
def test_a_fault_is_found(fault: Fault, references: dict[str, dict[bool, Comparer]], tmp_path: Path) -> None:
    small = shrunk((MIXTURE_RUNS | PACKING_RUNS | CONTEXT_RUNS)[fault.run])
    runs = Runs(small, [small.layout], tmp_path, functools.partial(start, fault))
    runs.comparers = references.setdefault(fault.run, {})
    checks = Verification(runs, [small.layout], lambda check: None).run(quick=True)
    finding = next((check.finding for check in checks if not check.passed), None)
    assert finding is not None, [check.error for check in checks]
    assert re.search(fault.module, f"{finding.what} of {finding.module}"), str(finding)
    assert re.search(fault.kind, finding.pattern), str(finding)
    assert finding.ranks == fault.ranks
