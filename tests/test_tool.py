"""Checks that several tools share."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from megatron.commands import merge_datasets, preprocess_data, train_tokenizer
from megatron.errors import InputError
from megatron.tool import write_output_file


@pytest.mark.parametrize("place", ["/", "//", "/."])
def test_the_root_is_no_place_for_output(tmp_path: Path, place: str) -> None:
    text = tmp_path / "text.txt"
    text.write_text("one two three")
    before = set(Path("/").iterdir())
    ids = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "9"]
    for tool, flag, words in (
        (train_tokenizer, "--output", ["--input", str(text), "--type", "bpe", "--vocab-size", "300"]),
        (preprocess_data, "--output-prefix", ["--input", str(text), *ids]),
        (merge_datasets, "--output-prefix", ["--input", str(tmp_path)]),
    ):
        with pytest.raises(InputError, match=f"^{flag}: {place} is the root of the file system"):
            tool.main([*words, flag, place])
    assert set(Path("/").iterdir()) == before


def test_a_part_of_a_file_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill_the_disk(path: Path, text: str, encoding: str) -> None:
        path.write_bytes(text[:2].encode(encoding))
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fill_the_disk)
    with pytest.raises(InputError, match=r"^--json: \S+ cannot be written \(No space left on device\)$"):
        write_output_file("--json", tmp_path / "plans.json", "[1, 2]")
    assert not (tmp_path / "plans.json").exists()
