"""tools/preprocess_data.py: report, errors, and interruptions."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "preprocess_data.py"
NULL = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "1000"]


def run(*flags: str | Path) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, TOOL, *flags], capture_output=True, text=True)


def children(pid: int) -> list[int]:
    """Return the running child processes of `pid`."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rsplit(") ", 1)[1].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(parent) == pid and state != "Z":
            found.append(int(stat.parent.name))
    return found


def test_nvidias_command_line(shared, tmp_path):
    """The flags of Megatron-LM's README, including its abbreviations."""
    done = run(
        *("--input", shared / "vectors/owt60.jsonl", "--output-prefix", tmp_path / "my-gpt2"),
        *(
            "--vocab",
            shared / "data/gpt2-tiny-vocab.json",
            "--merge-file",
            shared / "data/gpt2-tiny-merges.txt",
        ),
        *("--dataset-impl", "mmap", "--tokenizer-type", "GPT2BPETokenizer", "--json-key", "text"),
        *("--append-eod", "--workers", "2"),
    )
    assert done.returncode == 0, done.stderr
    reference = shared / "vectors/gpt-v2.5/tiny60_text_document"
    for kind in ("bin", "idx"):
        written = (tmp_path / f"my-gpt2_text_document.{kind}").read_bytes()
        assert written == Path(f"{reference}.{kind}").read_bytes()
    assert done.stdout.startswith(f"{tmp_path}/my-gpt2_text_document: 60 documents, 60 sequences, ")
    assert "encoder: tiktoken, " in done.stderr


def test_report(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "1 2"}\n{"text": ""}\n{"text": 3}\n')
    prefix = tmp_path / "o"
    done = run(
        "--input", path, "--output-prefix", prefix, *NULL, "--on-bad-line", "skip", "--log-interval", "1"
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:-1] == [
        f"{prefix}_text_document: 1 documents, 1 sequences, 2 tokens",
        "  1 documents without tokens were dropped",
        "1 bad lines were dropped, the first of them:",
        f"  {path}:3: 'text' is not text but a number",
    ]
    assert "MB/s" in lines[-1]
    assert "2 documents, " in done.stderr and "100%" in done.stderr


def test_note_for_plain_text(tmp_path):
    (tmp_path / "a.txt").write_text("1 2\n3\n\n4\n")
    (tmp_path / "a.jsonl").write_text('{"text": "1"}\n')
    note = "plain text (*.txt): "
    done = run("--input", tmp_path / "a.txt", "--output-prefix", tmp_path / "o", *NULL)
    assert f"{note}each file is one document" in done.stderr and ": 1 documents, " in done.stdout
    assert "warning" not in done.stderr
    flags = ["--txt-documents", "blank-lines"]
    done = run("--input", tmp_path / "a.txt", "--output-prefix", tmp_path / "o", *NULL, *flags)
    assert f"{note}blank lines separate documents" in done.stderr and ": 2 documents, " in done.stdout
    assert f"warning: {tmp_path}/o_text_document: documents have 2 tokens on average" in done.stderr
    assert note not in run("--input", tmp_path / "a.jsonl", "--output-prefix", tmp_path / "o", *NULL).stderr


def test_note_for_bert(tmp_path):
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nx\n")
    (tmp_path / "a.txt").write_text("x y\n")
    flags = ["--input", tmp_path / "a.txt", "--output-prefix", tmp_path / "o"]
    flags += ["--tokenizer-type", "BertWordPieceCase", "--vocab-file", tmp_path / "vocab.txt"]
    assert "--split-sentences" in run(*flags).stderr
    assert "--split-sentences" not in run(*flags, "--split-sentences").stderr
    assert {p.name for p in tmp_path.glob("*.idx")} == {"o_text_document.idx", "o_text_sentence.idx"}


IO_FLAGS = ["--input", "{tmp}/a.jsonl", "--output-prefix", "{tmp}/o"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--input is required"),
        (
            ["--input", "{tmp}/no.jsonl", "--output-prefix", "{tmp}/o", *NULL],
            "--input: {tmp}/no.jsonl does not exist",
        ),
        (["--input", "{tmp}/a.jsonl", "--output-prefix", "{tmp}/o"], "--tokenizer-type is required"),
        (["--input", "{tmp}/a.jsonl", "--output-prefix", "{tmp}/o", *NULL], "{tmp}/a.jsonl:1: is not JSON"),
        (["--input", "{tmp}/a.jsonl", "--worker", "2"], "did you mean --workers?"),
        ([*IO_FLAGS, "--workers", "0"], "--workers: 0 is too small"),
        ([*IO_FLAGS, "--dataset-impl", "cached"], "--dataset-impl: 'cached' is not one of mmap"),
        ([*IO_FLAGS, "--on-bad-line", "cry"], "--on-bad-line: 'cry' is not one of stop, skip"),
    ],
)
def test_wrong_input_is_one_line_and_leaves_no_file(flags, message, tmp_path):
    (tmp_path / "a.jsonl").write_text("text\n")
    done = run(*(f.format(tmp=tmp_path) for f in flags))
    assert done.returncode == 2
    *notes, error = done.stderr.splitlines()
    assert all(note.startswith("encoder: ") for note in notes)
    assert error.startswith("error: ") and message.format(tmp=tmp_path) in error
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM, "SIGKILL to a worker"])
def test_an_interruption_leaves_no_finished_files_and_no_processes(stop, tmp_path):
    source = tmp_path / "a.jsonl"
    line = json.dumps({"text": " ".join(map(str, range(500)))}) + "\n"
    source.write_text(line * 40_000)
    command = [sys.executable, TOOL, "--input", source, "--output-prefix", tmp_path / "o", *NULL]
    command += ["--workers", "2", "--log-interval", "100"]
    tool = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while "documents, " not in tool.stderr.readline():
        assert tool.poll() is None
    started = children(tool.pid)
    assert len(started) >= 2
    assert list(tmp_path.glob("o_text_document.*.part"))
    if stop == signal.SIGINT:
        os.killpg(tool.pid, stop)  # like Ctrl-C in a terminal
    elif stop == signal.SIGTERM:
        tool.send_signal(stop)
    else:
        workers = [p for p in started if b"resource_tracker" not in Path(f"/proc/{p}/cmdline").read_bytes()]
        os.kill(workers[0], signal.SIGKILL)
    errors = tool.communicate(timeout=120)[1]
    assert tool.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}.get(stop, 2)
    assert "Traceback" not in errors
    if tool.returncode == 2:
        assert "error: a worker process was killed by signal 9" in errors
    assert {p.suffix for p in tmp_path.iterdir()} <= {".jsonl", ".part"}  # .part after half a minute
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{p}").exists() for p in started) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [p for p in started if Path(f"/proc/{p}").exists()]
