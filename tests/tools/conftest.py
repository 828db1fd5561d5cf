"""Fixtures of the tools' tests."""

from __future__ import annotations

import shlex

import pytest

from megatron.commands import plan as plan_command


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]):
    def run(flags: str) -> str:
        plan_command.main(shlex.split(flags))
        return capsys.readouterr().out

    return run
