"""tools/lm_eval_adapter.py without lm_eval; tests/evaluation/test_harness.py runs it with lm_eval."""

from __future__ import annotations

import sys

import pytest

from megatron.errors import InputError
from tools.lm_eval_adapter import main

NEEDED = ["--load", "run", "--tasks", "lambada_openai"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (NEEDED[:2], "the following arguments are required: --tasks"),
        ([*NEEDED, "--batch-size", "0"], "--batch-size: 0 is too small; it must be at least 1"),
        ([*NEEDED, "--limit", "1.5"], "--limit: 1.5 is neither an integer nor a fraction below 1"),
        ([*NEEDED, "--limit", "nan"], "--limit: nan is neither"),
        ([*NEEDED, "--include_path", "nowhere"], "--include-path: nowhere is not a folder"),
        (
            [*NEEDED, "--output", "nowhere/x.json"],
            "--output-path: nowhere/x.json cannot be written: there is no directory",
        ),
    ],
)
def test_wrong_flags_are_one_line(words: list[str], message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        main(words)


def test_without_lm_eval_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "megatron.evaluation.harness", raising=False)
    with pytest.raises(InputError, match=r"is not installed: pip install lm_eval==0\.4\.13$"):
        main(NEEDED)
