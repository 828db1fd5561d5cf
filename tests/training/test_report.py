"""Log line and history."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from intervals import interval

from megatron.parallel.mesh import Mesh
from megatron.training.report import History, Log, loss_report

MESH = Mesh(device=torch.device("cpu"))


def test_line_has_nvidias_format() -> None:
    line = interval([(9, 2.5, 1.0), (10, 3.5, 2.0)]).line()
    assert line == (
        " iteration       10/     500 | consumed samples:           80 | elapsed time per iteration (ms): 123.4 | "
        "learning rate: 1.500E-04 | global batch size:     8 | lm loss: 3.000000E+00 | loss scale: 1.0 | "
        "grad norm: 2.000 | number of skipped iterations:   0 | number of nan iterations:   0 | "
        "tokens per second: 12345.6 | MFU: 45.3% |"
    )
    # The regular expression by which scripts parse the loss from Megatron-LM's logs.
    assert re.search(r"lm loss: ([0-9.E+-]+) \|", line).group(1) == "3.000000E+00"


def test_nan_is_printed_and_counted() -> None:
    nan = float("nan")
    line = interval([(9, 2.5, 1.0), (10, nan, nan)], params_norm=3.0).line()
    assert "lm loss: nan |" in line
    assert "grad norm: nan" in line
    assert "number of nan iterations:   1 |" in line
    assert "params norm: 3.000" in line


def test_history_continues_after_a_resume() -> None:
    history = History(("lm loss",), [])
    for i in (1, 2):
        history.add(i, 8 * i, torch.tensor([float(i)], dtype=torch.float64), {"grad norm": torch.tensor(0.5)})
    history.collect(MESH)
    resumed = History(("lm loss",), json.loads(json.dumps(history.rows)))
    resumed.add(3, 24, torch.tensor([0.1], dtype=torch.float64), {"grad norm": torch.tensor(0.25)})
    resumed.collect(MESH)
    assert [row["iteration"] for row in resumed.rows] == [1, 2, 3]
    assert resumed.rows[-1] == {"iteration": 3, "consumed samples": 24, "lm loss": 0.1, "grad norm": 0.25}
    assert len(resumed.take()) == 3 and resumed.rows == []


def test_a_capped_perplexity_is_marked() -> None:
    line, values = loss_report("iteration 1", "validation", {"lm loss": 25.0})
    assert "lm loss PPL: >4.851652E+08" in line and values["lm loss validation"] == 25.0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_under_standard_output(monkeypatch, capsys) -> None:
    log = Log(MESH)
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        log("a line")
        log("another")
        monkeypatch.undo()
        with pytest.raises(OSError):
            full.close()
    assert "standard output: No space left on device; the run continues" in capsys.readouterr().err
