"""tools/merge_datasets.py: merged files equal those of preprocessing all text at once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "merge_datasets.py"
PREPROCESS = "tools/preprocess_data.py"


@pytest.mark.parametrize("level", ["document", "sentence"])
def test_merging_equals_preprocessing_the_texts_together(
    level: str, tmp_path: Path, command: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    lines = [json.dumps({"text": topics[name]}) for name in sorted(topics)[:40]]
    (tmp_path / "whole.jsonl").write_text("\n".join(lines) + "\n")
    vocabulary = tmp_path / "vocab.txt"
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz.,:;()'"]
    pieces += [f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"]
    vocabulary.write_text("\n".join(pieces))
    flags = ["--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", vocabulary]
    flags += ["--split-sentences"] if level == "sentence" else []
    command(PREPROCESS, "--input", tmp_path / "whole.jsonl", "--output-prefix", tmp_path / "whole", *flags)
    for i, part in enumerate((lines[:3], lines[3:25], lines[25:])):
        (tmp_path / f"part{i}.jsonl").write_text("\n".join(part) + "\n")
        output = tmp_path / "parts" / f"part{i}"
        command(PREPROCESS, "--input", tmp_path / f"part{i}.jsonl", "--output-prefix", output, *flags)
    done = command(
        "tools/merge_datasets.py", "--input", tmp_path / "parts", "--output-prefix", tmp_path / "merged"
    )
    assert done.stdout.startswith(f"{tmp_path}/merged: 40 documents, ")
    assert done.stdout.endswith(" tokens, from 3 pairs of files\n")
    for kind in (".bin", ".idx"):
        whole = tmp_path / f"whole_text_{level}{kind}"
        assert (tmp_path / f"merged{kind}").read_bytes() == whole.read_bytes()


def test_errors_are_one_line(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, TOOL, "--input", tmp_path], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: --output-prefix is required: ") and done.stderr.count("\n") == 1
