"""History of iterations, and the log."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import pytest
import torch

from megatron.parallel.mesh import Mesh
from megatron.training.report import History, Log, show_log

MESH = Mesh(device=torch.device("cpu"))


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


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_under_standard_output(monkeypatch, capsys) -> None:
    logger = logging.getLogger("megatron")
    monkeypatch.setattr(logger, "handlers", [])
    with open("/dev/full", "w") as full:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", full)
            show_log(MESH, "info")
            log = Log(MESH)
            for line in (logger.info, log, logger.info, log):
                line("a line")
        with pytest.raises(OSError):
            full.close()
    message = "standard output: No space left on device; the run continues without it\n"
    assert capsys.readouterr().err == message
