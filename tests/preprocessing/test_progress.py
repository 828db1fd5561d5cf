"""Progress reports of tools."""

from __future__ import annotations

import sys
import time

import pytest

from megatron.preprocessing.progress import Progress


def test_lines_off_a_terminal(capsys):
    with Progress(total_bytes=1000, log_interval=100) as progress:
        for step in range(1, 11):
            time.sleep(0.001)
            progress.update(documents=30, text_bytes=10_000, read_bytes=100 * step)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines] == ["120 documents", "210 documents", "300 documents"]
    assert " MB/s, 40%, 00:00 left" in lines[0]
    assert lines[-1].endswith("100%, 00:00 left")
    assert (progress.documents, progress.text_bytes) == (300, 100_000)


def test_a_bar_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with Progress(total_bytes=1000, log_interval=1) as progress:
        progress.update(documents=30, text_bytes=10_000, read_bytes=1000)
    shown = capsys.readouterr().err
    assert "100%" in shown and "30 documents" in shown and "MB/s" in shown


def test_input_of_unknown_size(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(total_bytes=None, log_interval=1) as progress:
        progress.update(1, 2_000_000, 0)
    line = capsys.readouterr().err
    assert line.startswith("1 documents, ") and line.endswith(" MB/s\n")
