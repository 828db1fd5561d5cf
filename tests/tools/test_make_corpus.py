"""The quickstart's corpus: large enough, clean and deterministic."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.commands.make_corpus import first_megabytes

TOOL = Path(__file__).resolve().parents[2] / "tools" / "make_corpus.py"


def run(*flags: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(TOOL), *flags], capture_output=True, text=True, env=os.environ | env
    )


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "new" / "corpus.jsonl"
    done = run("--output", str(path), PYTHONHASHSEED="1")
    assert done.returncode == 0, done.stderr
    return path


def test_holds_ten_megabytes_of_distinct_documents(corpus):
    documents = [json.loads(line) for line in corpus.read_text(encoding="utf-8").splitlines()]
    assert all(set(d) == {"text", "source"} and d["text"].strip() for d in documents)
    assert len({d["source"] for d in documents}) == len(documents)
    assert sum(len(d["text"].encode()) for d in documents) >= 10e6

    text = {d["source"]: d["text"] for d in documents}
    assert "assert_stmt" in text["pydoc_data.topics/assert"]
    assert "class JSONDecoder" in text["json/decoder.py"]
    assert "builtins.str.split" in text["builtins.str"]
    assert "pydoc_data/topics.py" not in text, "the language reference would be there twice"
    assert "encodings/cp855.py" not in text and "html/entities.py" not in text, "tables"
    assert not [s for s in text if {"test", "tests", "idle_test", "site-packages"} & set(s.split("/"))]


def test_is_deterministic(corpus, tmp_path):
    again = tmp_path / "again.jsonl"
    assert run("--output", str(again), PYTHONHASHSEED="2").returncode == 0
    assert again.read_bytes() == corpus.read_bytes()


def test_megabytes_takes_the_first_documents(corpus, tmp_path):
    part = tmp_path / "part.jsonl"
    done = run("--output", str(part), "--megabytes", "0.5")
    assert done.returncode == 0, done.stderr
    assert corpus.read_bytes().startswith(part.read_bytes())
    lengths = [len(json.loads(line)["text"].encode()) for line in part.read_text().splitlines()]
    assert sum(lengths) >= 0.5e6 > sum(lengths[:-1])
    # A megabyte is enough for --megabytes 1. Bytes count, not characters.
    documents = [("a", "ä" * 500_000), ("b", "b")]
    assert first_megabytes(documents, 1.0) == documents[:1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--output is required"),
        (["--output", "{tmp}/c.jsonl", "--megabytes", "1000"], "--megabytes: 1000 is too much"),
        (["--output", "{tmp}/c.jsonl", "--megabytes", "0"], "--megabytes"),
        (["--output", "{tmp}"], "--output: {tmp} cannot be written"),
        (["--output", "/"], "--output: / cannot be written: it is a directory"),
        (["--output", "{tmp}/c.jsonl", "--megabyte", "1"], "did you mean --megabytes?"),
    ],
)
def test_wrong_input_is_one_line_and_leaves_no_file(flags, message, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    done = run(*(f.format(tmp=folder) for f in flags))
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert message.format(tmp=folder) in done.stderr
    assert not any(folder.iterdir())
