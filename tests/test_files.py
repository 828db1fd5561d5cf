"""Files with a largest size, and the messages of their readers about files that are larger."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path

import pytest

from megatron.arguments import parse_run_config
from megatron.checkpoint.manifest import read_manifest
from megatron.checkpoint.storage import TRACKER, newest_iteration
from megatron.errors import InputError
from megatron.files import read_file
from megatron.inference.server.config import ServerConfig
from megatron.reports import record
from megatron.reports.writers import MetricsFile
from megatron.settings.rolled_back import rolled_back_to
from megatron.tokenizer.base import read_json
from megatron.tokenizer.sentence_piece import SentencePieceTokenizer

CONFIG = parse_run_config(
    "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --micro-batch-size 1 --train-iters 1 "
    "--lr 1".split(),
    description="",
    defaults={},
)


def sparse(path: Path) -> Path:
    """A file of 4 TB that takes no room on disk."""
    path.touch()
    os.truncate(path, 4 << 40)
    return path


def test_read_file(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"12345")
    assert read_file(path, 5) == read_file(str(path)) == b"12345"
    with pytest.raises(OSError, match="larger than 4 bytes") as caught:
        read_file(path, 4)
    assert caught.value.strerror == "larger than 4 bytes"
    with pytest.raises(OSError, match="larger than 1000 bytes"):  # it has no size
        read_file("/dev/zero", 1000)
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "absent")


@pytest.mark.parametrize(
    ("name", "read", "most"),
    [
        (TRACKER, lambda path: newest_iteration(path.parent), 1000),
        ("index.json", lambda path: read_manifest(path.parent), 1 << 30),
        ("vocab.json", lambda path: read_json(str(path)), 1 << 28),
        ("x.model", lambda path: SentencePieceTokenizer(str(path)), 1 << 28),
        ("key", lambda path: ServerConfig(api_key_file=str(path)).api_key(), 1000),
        ("metrics", lambda path: MetricsFile(path, CONFIG).start(0, 0, evaluation_due=False), 1 << 32),
    ],
)
def test_readers_of_a_sparse_file(tmp_path: Path, name: str, read, most: int) -> None:
    if name.endswith(".model"):
        pytest.importorskip("sentencepiece")
    path = sparse(tmp_path / name)
    tracemalloc.start()
    with pytest.raises(InputError, match=f"{path}.*larger than {most} bytes"):
        read(path)
    assert tracemalloc.get_traced_memory()[1] < 10**7
    tracemalloc.stop()


def test_metrics_of_nested_brackets(tmp_path: Path) -> None:
    (tmp_path / "metrics").write_text("[" * 10**5 + "\n")
    with pytest.raises(InputError, match=r"--metrics-path: .*metrics is not a file of metrics"):
        MetricsFile(tmp_path / "metrics", CONFIG).start(0, 0, evaluation_due=False)


@pytest.mark.parametrize("suffix", ["jsonl", "events.jsonl"])
def test_a_page_of_zeros_within_metrics(
    tmp_path: Path, suffix: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A run goes on with the other lines, and the damaged file is kept."""
    rows = [json.dumps({"iteration": i, "learning rate": 1.0}) + "\n" for i in range(1, 5)]
    (tmp_path / "metrics.jsonl").write_text("".join(rows))
    path = tmp_path / f"metrics.{suffix}"
    damaged = rows[0] + "\0" * 20 + "\n" + rows[2] + rows[3]
    path.write_text(damaged)
    writer = MetricsFile(tmp_path / "metrics.jsonl", CONFIG)
    writer.start(4, 32, evaluation_due=False)
    writer.close(failed=False)
    assert path.read_text().startswith(rows[0] + rows[2] + rows[3])
    assert (tmp_path / f"metrics.{suffix}.damaged").read_text() == damaged
    assert "1 of 4 lines are damaged and left out" in caplog.text


def test_a_report_of_sparse_metrics(tmp_path: Path) -> None:
    path = sparse(tmp_path / "metrics.jsonl")
    with pytest.raises(InputError, match=rf"^{path}: larger than {record.MAX_BYTES} bytes$"):
        record.read_record(tmp_path)


def test_a_sparse_note_of_a_roll_back_counts_as_none(tmp_path: Path) -> None:
    sparse(tmp_path / "taken_back_to_iteration.txt")
    assert rolled_back_to(tmp_path) is None
