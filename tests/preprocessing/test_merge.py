from __future__ import annotations

import errno
import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data.indexed import IndexedDataset
from megatron.data.indexed_writer import IndexedDatasetWriter
from megatron.errors import InputError
from megatron.preprocessing.merge import MergeConfig, merge
from megatron.tokenizer import build_tokenizer
from megatron.tokenizer.config import TokenizerConfig
from megatron.tokenizer.record import describe_tokenizer, write_tokenizer


def write(prefix: Path, documents: list[list[list[int]]], dtype: type = np.uint16) -> None:
    prefix.parent.mkdir(exist_ok=True)
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(document)


def run(folder: Path, output: Path) -> IndexedDataset:
    merge(MergeConfig(input=str(folder), output_prefix=str(output)))
    return IndexedDataset(output)


@pytest.mark.parametrize(
    "name",
    [
        "owt60_gpt2_append_eod_text_document",
        "gpt-v2.5/tiny60_text_document",
        "bert-v2.5/bert60_text_sentence",
    ],
)
def test_merging_parts_reproduces_megatrons_files(shared: Path, tmp_path: Path, name: str) -> None:
    whole = IndexedDataset(shared / "vectors" / name)
    bounds = [0, 1, 20, 20, 57, 60]  # one part is empty
    for i, (first, last) in enumerate(itertools.pairwise(bounds)):
        ends = whole.doc_idx[first : last + 1]
        documents = [[whole.get(j).tolist() for j in range(a, b)] for a, b in itertools.pairwise(ends)]
        write(tmp_path / "parts" / f"part{i}", documents, whole.dtype)
    run(tmp_path / "parts", tmp_path / "merged")
    for kind in (".bin", ".idx"):
        assert (tmp_path / f"merged{kind}").read_bytes() == Path(f"{whole.prefix}{kind}").read_bytes()


def test_document_boundaries_are_offset(tmp_path: Path, capsys) -> None:
    """As in Megatron-LM, all boundaries of a file but the first are offset by the number of preceding sequences."""
    parts = {
        "b": [[[1, 2], [3]], [], [[4]]],
        "a": [[[5]], [[], [6, 7, 8]]],
        "a.b": [],
        "c": [[[9]]],
    }
    for name, documents in parts.items():
        write(tmp_path / "parts" / name, documents, np.int32)
    (tmp_path / "parts" / "README").write_text("not data")
    (tmp_path / "parts" / "index-cache").mkdir()
    merged = run(tmp_path / "parts", tmp_path / "merged")
    assert merged.sizes.tolist() == [1, 0, 3, 2, 1, 1, 1]
    assert merged.doc_idx.tolist() == [0, 1, 3, 5, 5, 6, 7]
    assert merged.tokens.tolist() == [5, 6, 7, 8, 1, 2, 3, 4, 9]
    assert merged.dtype == np.int32
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("6 documents, ") and "100%" in lines[-1]


def test_files_larger_than_a_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.RandomState(0)
    parts = [
        [[rng.randint(9, size=rng.randint(5)).tolist() for _ in range(rng.randint(4))] for _ in range(30)]
        for _ in range(3)
    ]
    write(tmp_path / "whole", list(itertools.chain.from_iterable(parts)))
    monkeypatch.setattr("megatron.data.indexed.CHUNK", 4)
    for i, documents in enumerate(parts):
        write(tmp_path / "parts" / str(i), documents)
    run(tmp_path / "parts", tmp_path / "merged")
    for kind in (".bin", ".idx"):
        assert (tmp_path / f"merged{kind}").read_bytes() == (tmp_path / f"whole{kind}").read_bytes()


def test_files_without_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "ab":
        write(tmp_path / "parts" / name, [[[]], []])
    run(tmp_path / "parts", tmp_path / "merged")
    assert IndexedDataset(tmp_path / "merged").doc_idx.tolist() == [0, 1, 1, 2, 2]
    assert capsys.readouterr().err.splitlines()[-1].startswith("4 documents, ")


def test_wrong_folders(tmp_path: Path) -> None:
    output = tmp_path / "merged"
    with pytest.raises(InputError, match=r"--input: \S+/none/a is not a readable directory: No such file"):
        run(tmp_path / "none/a", output)
    with pytest.raises(
        InputError, match=r"--input: \S+/none is neither a directory nor the prefix of shards"
    ):
        run(tmp_path / "none", output)
    parts = tmp_path / "parts"
    parts.mkdir()
    with pytest.raises(InputError, match=r"--input: \S+/parts has no \.bin and \.idx files"):
        run(parts, output)
    write(parts / "a", [[[1]]])
    write(parts / "b", [[[2]]])
    with pytest.raises(
        InputError, match=r"--output-prefix: \S+/parts/b is one of the files to merge in --input"
    ):
        run(parts, parts / "b")
    write(parts / "c", [[[2]]], np.int32)
    with pytest.raises(
        InputError, match=r"parts/c\.idx has dtype int32, but \S+/parts/a\.idx has uint16; only files of one"
    ):
        run(parts, output)
    (parts / "c.bin").unlink()
    with pytest.raises(InputError, match=r"parts/c\.bin does not exist"):
        run(parts, output)
    (parts / "c.idx").unlink()
    (parts / "b.bin").write_bytes(b"x")
    with pytest.raises(InputError, match=r"parts/b\.bin: 1 bytes, but"):
        run(parts, output)
    assert sorted(os.listdir(tmp_path)) == ["parts"]


def test_an_interrupted_merge_keeps_the_old_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "ab":
        write(tmp_path / "parts" / name, [[[1]]])
    write(tmp_path / "merged", [[[7]]])

    def interrupted(writer: IndexedDatasetWriter, dataset: IndexedDataset, copied: object) -> None:
        assert {path.suffix for path in tmp_path.glob("merged*")} == {".bin", ".idx", ".part"}
        if dataset.prefix.endswith("b"):
            raise KeyboardInterrupt

    monkeypatch.setattr(IndexedDatasetWriter, "add_dataset", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts", tmp_path / "merged")
    assert sorted(os.listdir(tmp_path)) == ["merged.bin", "merged.idx", "parts"]
    assert IndexedDataset(tmp_path / "merged").tokens.tolist() == [7]


def test_a_full_disk_under_the_tokenizer_keeps_the_old_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=9)
    record = describe_tokenizer(build_tokenizer(config), config)
    write(tmp_path / "parts" / "a", [[[1]]])
    write_tokenizer(str(tmp_path / "parts" / "a"), record, {})()
    write(tmp_path / "merged", [[[7]]])

    def full(*arguments: Any) -> None:
        write_tokenizer(*arguments)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("megatron.preprocessing.merge.write_tokenizer", full)
    with pytest.raises(InputError, match=r"cannot be written: No space left"):
        run(tmp_path / "parts", tmp_path / "merged")
    assert sorted(os.listdir(tmp_path)) == ["merged.bin", "merged.idx", "parts"]
    assert IndexedDataset(tmp_path / "merged").tokens.tolist() == [7]
