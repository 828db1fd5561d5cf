"""Deletion of old checkpoints that fails."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from megatron.checkpoint.storage import folder_of
from megatron.recipes import retention
from megatron.recipes.config import RetentionConfig


@pytest.mark.parametrize("flag", ["--keep-last", "--save-retain-interval"])
def test_a_failure_names_the_flag(
    flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(folder: Path) -> None:
        raise OSError(f"{folder} is busy")

    for iteration in (1, 2):
        folder_of(tmp_path, iteration).mkdir()
    monkeypatch.setattr(retention, "discard", fail)
    config = (
        RetentionConfig(keep_last=1) if flag == "--keep-last" else RetentionConfig(save_retain_interval=4)
    )
    with caplog.at_level(logging.WARNING, logger="megatron"):
        retention.discard_older(tmp_path, 2, config=config)
    assert caplog.messages == [f"{flag}: cannot delete an older checkpoint: {folder_of(tmp_path, 1)} is busy"]
