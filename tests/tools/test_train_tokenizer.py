"""tools/train_tokenizer.py, and tools/preprocess_data.py with its files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def run(tool: str, *flags: str | Path) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, TOOLS / tool, *flags], capture_output=True, text=True)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "topics.jsonl"
    path.write_text("".join(json.dumps({"body": topics[name]}) + "\n" for name in sorted(topics)))
    return path


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("bpe", ["merges.txt", "tokenizer.json", "tokenizer_config.json", "vocab.json"]),
        ("wordpiece", ["tokenizer_config.json", "vocab.txt"]),
    ],
)
def test_files_are_deterministic(kind, names, corpus, tmp_path):
    flags = ["--input", corpus, "--json-key", "body", "--type", kind, "--vocab-size", "800"]
    for folder in ("one", "deep/two"):
        done = run("train_tokenizer.py", *flags, "--output", tmp_path / folder)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"{tmp_path / folder}: ") and "800 ids" in done.stdout
        assert sorted(p.name for p in (tmp_path / folder).iterdir()) == names
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "deep/two" / name).read_bytes()


def test_both_formats_of_a_bpe_encode_alike(corpus, tmp_path):
    flags = ["--input", corpus, "--json-key", "body"]
    assert (
        run(
            "train_tokenizer.py", *flags, "--type", "bpe", "--vocab-size", "800", "--output", tmp_path
        ).returncode
        == 0
    )
    formats = {
        "gpt2": [
            "GPT2BPETokenizer",
            "--vocab-file",
            tmp_path / "vocab.json",
            "--merge-file",
            tmp_path / "merges.txt",
        ],
        "hf": ["HuggingFaceTokenizer", "--tokenizer-model", tmp_path],
    }
    written = []
    for name, tokenizer in formats.items():
        prefix = tmp_path / name
        done = run(
            "preprocess_data.py",
            *flags,
            "--append-eod",
            "--output-prefix",
            prefix,
            "--tokenizer-type",
            *tokenizer,
        )
        assert done.returncode == 0, done.stderr
        written.append([Path(f"{prefix}_body_document.{kind}").read_bytes() for kind in ("bin", "idx")])
    assert written[0] == written[1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--output", "{tmp}/t"], "--input is required"),
        (["--input", "{corpus}", "--output", "{tmp}/t"], "--type is required"),
        (["--input", "{corpus}", "--type", "bpe", "--output", "{tmp}/t"], "--vocab-size is required"),
        (["--input", "{corpus}", "--type", "bpe", "--vocab-size", "500"], "--output is required"),
        (
            ["--input", "{corpus}", "--type", "bpe", "--vocab-size", "500", "--output", "{tmp}/t"],
            "has no key 'text'",
        ),
        (
            ["--input", "no.*", "--type", "bpe", "--vocab-size", "500", "--output", "{tmp}/t"],
            "no.* matches no file",
        ),
        (
            ["--input", "{corpus}", "--type", "word", "--vocab-size", "500"],
            "--type: 'word' is not one of bpe, wordpiece",
        ),
        (
            ["--input", "{corpus}", "--type", "bpe", "--vocab-size", "500", "--output", "{tmp}/t", "--cased"],
            "--cased",
        ),
        (
            [
                "--input",
                "{corpus}",
                "--json-key",
                "body",
                "--type",
                "bpe",
                "--vocab-size",
                "99",
                "--output",
                "{tmp}/t",
            ],
            "--vocab-size: 99 is too small",
        ),
        (
            [
                "--input",
                "{corpus}",
                "--json-key",
                "body",
                "--type",
                "bpe",
                "--vocab-size",
                "500",
                "--output",
                "{corpus}",
            ],
            "--output: {corpus} cannot be written: File exists",
        ),
    ],
)
def test_wrong_input_is_one_line_and_leaves_no_file(flags, message, corpus, tmp_path):
    done = run("train_tokenizer.py", *(f.format(tmp=tmp_path, corpus=corpus) for f in flags))
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert message.format(corpus=corpus) in done.stderr
    assert not list(tmp_path.iterdir())
