"""tools/inspect_data.py: summary, documents and errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.data.indexed_writer import IndexedDatasetWriter

TOOL = Path(__file__).resolve().parents[2] / "tools" / "inspect_data.py"
NULL = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "50"]


def run(*flags: str | Path) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, TOOL, *flags], capture_output=True, text=True)


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """Two documents, of 2 sequences and of 1; the second ends with the end-of-document token of `NULL`."""
    with IndexedDatasetWriter(tmp_path / "data", np.uint16) as writer:
        writer.add_document([[1, 2, 3], [4]])
        writer.add_document([[5, 49, 7, 8, 50]])
    return tmp_path / "data"


def test_summary(prefix):
    done = run(prefix)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        f"{prefix}: format version 1, uint16",
        "documents  2",
        "sequences  3",
        "tokens     9",
        "tokens in a sequence    1 to 5, 3.0 on average",
        "sequences in a document 1 to 2, 1.5 on average",
        "highest id 50",
    ]


def test_shows_documents(prefix):
    done = run(prefix, *NULL, "--show", "5")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[6:] == [
        "highest id 50, of 51 ids",
        "end-of-document token at the end of 1 of the first 2 documents",
        "--- document 0",
        "1 2 3 4",
        "--- document 1",
        "5 49 7 8 50",
    ]


def test_empty_files(tmp_path):
    with IndexedDatasetWriter(tmp_path / "data", np.uint16):
        pass
    done = run(tmp_path / "data", *NULL, "--show", "1")
    assert (done.returncode, done.stderr) == (0, "")
    assert "tokens     0" in done.stdout


def test_negative_ids_are_found(tmp_path):
    with IndexedDatasetWriter(tmp_path / "data", np.int32) as writer:
        writer.add_document([[1], [2, -3]])
    done = run(tmp_path / "data")
    assert done.returncode == 2
    assert (
        done.stderr
        == f"error: {tmp_path}/data.bin: token 2 (in sequence 1) is -3; ids must be not negative\n"
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "PREFIX"),
        (["{prefix}x"], "did you mean {prefix}?"),
        (["{prefix}", "--show", "1"], "--show needs the tokenizer"),
        (["{prefix}", "--show", "-1"], "--show: -1 is too small"),
        (
            ["{prefix}", "--vocab-size", "50"],
            "{prefix}.bin: token 8 (in sequence 2) is 50; ids must be 0 to 49",
        ),
        (["{prefix}", "--tokenizer-type", "GPT2BPETokenizer"], "--vocab-file is required"),
    ],
)
def test_errors_are_one_line(flags, message, prefix):
    done = run(*(f.format(prefix=prefix) for f in flags))
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert message.format(prefix=prefix) in done.stderr


def test_a_truncated_file(prefix):
    path = Path(f"{prefix}.bin")
    path.write_bytes(path.read_bytes()[:-1])
    done = run(prefix)
    assert done.returncode == 2
    assert f"error: {path}: 17 bytes, but" in done.stderr
