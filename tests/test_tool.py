"""Checks that several tools share."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from megatron.commands import merge_datasets, preprocess_data, train_tokenizer
from megatron.errors import InputError
from megatron.tool import replacing, write_output_file


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
    """A file that was there stays as it was."""

    def fill_the_disk(path: Path, text: str, encoding: str) -> None:
        path.write_bytes(text[:2].encode(encoding))
        raise OSError(errno.ENOSPC, "No space left on device")

    old = tmp_path / "old.json"
    old.write_text("[0]")
    monkeypatch.setattr(Path, "write_text", fill_the_disk)
    for path in (tmp_path / "plans.json", old):
        with pytest.raises(InputError, match=r"^--json: \S+ cannot be written \(No space left on device\)$"):
            write_output_file("--json", path, "[1, 2]")
    assert list(tmp_path.iterdir()) == [old] and old.read_text() == "[0]"


def test_a_picture_on_a_full_disk(tmp_path: Path) -> None:
    with (
        pytest.raises(InputError, match=r"^--picture: \S+ cannot be written \(No space left on device\)$"),
        replacing("--picture", tmp_path / "x.png") as target,
    ):
        target.write_bytes(b"part")
        raise OSError(errno.ENOSPC, "No space left on device")
    assert not list(tmp_path.iterdir())


def test_where_an_output_file_is_written(tmp_path: Path) -> None:
    """Behind a link, or in place where a name is no file."""
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_output_file("--json", tmp_path / "link", "[1]")
    write_output_file("--json", Path("/dev/null"), "[1]")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "[1]"
    assert Path("/dev/null").is_char_device()
    (tmp_path / "out").touch()
    with (tmp_path / "out").open() as file:
        write_output_file("--json", Path(f"/dev/fd/{file.fileno()}"), "[1]")
        assert file.read() == "[1]"
