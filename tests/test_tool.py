"""Checks that several tools share."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.commands import merge_datasets, preprocess_data, train_tokenizer
from megatron.errors import InputError


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
