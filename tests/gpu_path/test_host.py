"""benchmarks/host.py runs; its figures are for a quiet machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.mark.slow
def test_host_time_of_a_layer(command: Callable, tmp_path: Path) -> None:
    command("benchmarks/host.py", "--rounds", 1, "--output", tmp_path / "host.json")
    results = json.loads((tmp_path / "host.json").read_text(encoding="utf-8"))
    for shape in ("GPT-2", "Llama"):
        assert results[shape].keys() == {"ours, us", "eager, us", "ratio"}
