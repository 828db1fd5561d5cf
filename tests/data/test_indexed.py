from __future__ import annotations

import logging
import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest

from megatron.data.indexed import DTYPES, HEADER, MAGIC, IndexedDataset
from megatron.data.indexed_writer import IndexedDatasetWriter, best_dtype
from megatron.errors import InputError

VECTORS = (
    "owt60_gpt2_append_eod_text_document",
    "gpt-v2.5/tiny60_text_document",
    "bert-v2.5/bert60_text_sentence",
)


def index_bytes(sizes, doc_idx, *, code=8, itemsize=2, version=1, magic=MAGIC) -> bytes:
    """An .idx file, built from the description of the format."""
    pointers = np.concatenate([[0], np.cumsum(sizes)[:-1]]) * itemsize if len(sizes) else []
    return (
        struct.pack("<9sQBQQ", magic, version, code, len(sizes), len(doc_idx))
        + np.asarray(sizes, "<i4").tobytes()
        + np.asarray(pointers, "<i8").tobytes()
        + np.asarray(doc_idx, "<i8").tobytes()
    )


def write_files(folder: Path, idx: bytes, tokens: int = 5, itemsize: int = 2) -> Path:
    (folder / "x.idx").write_bytes(idx)
    (folder / "x.bin").write_bytes(bytes(tokens * itemsize))
    return folder / "x"


@pytest.mark.parametrize("name", VECTORS)
def test_files_equal_megatron(shared: Path, tmp_path: Path, name: str) -> None:
    source = shared / "vectors" / name
    theirs = IndexedDataset(source)
    with IndexedDatasetWriter(tmp_path / "one", theirs.dtype) as writer:
        for first, last in zip(theirs.doc_idx[:-1], theirs.doc_idx[1:], strict=True):
            writer.add_document([theirs.get(i).tolist() for i in range(first, last)])
    with IndexedDatasetWriter(tmp_path / "bulk", theirs.dtype) as writer:
        tokens = np.concatenate([theirs.get(i) for i in range(len(theirs))]).astype(np.int64)
        writer.add_documents(tokens, theirs.sizes, np.diff(theirs.doc_idx))
    for extension in (".idx", ".bin"):
        expected = Path(f"{source}{extension}").read_bytes()
        assert (tmp_path / f"one{extension}").read_bytes() == expected
        assert (tmp_path / f"bulk{extension}").read_bytes() == expected
    assert theirs.num_tokens == sum(theirs.sizes)


@pytest.mark.parametrize("dtype", list(DTYPES.values()), ids=str)
def test_round_trip(tmp_path: Path, dtype: np.dtype) -> None:
    limits = np.iinfo(dtype)
    documents = [[[1, 2, 3], [limits.max]], [], [[]], [[limits.min, 0]]]
    with IndexedDatasetWriter(tmp_path / "x", dtype) as writer:
        for document in documents:
            writer.add_document(document)
    read = IndexedDataset(tmp_path / "x")
    assert read.dtype == dtype
    assert read.sizes.tolist() == [3, 1, 0, 2]
    assert read.doc_idx.tolist() == [0, 2, 2, 3, 4]
    assert [read.get(i).tolist() for i in range(len(read))] == [[1, 2, 3], [limits.max], [], [limits.min, 0]]
    assert read.get(0, 1).tolist() == [2, 3]
    assert read.get(0, 1, 1).tolist() == [2]
    assert read.num_tokens == 6
    copy = pickle.loads(pickle.dumps(read))  # noqa: S301, pickled here
    assert copy.get(3).tolist() == read.get(3).tolist()


def test_empty_dataset(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "x", np.int32):
        pass
    read = IndexedDataset(tmp_path / "x")
    assert len(read) == read.num_tokens == 0
    assert read.doc_idx.tolist() == [0]


def test_workers_map_the_files_and_check_only_their_sizes(tmp_path: Path, monkeypatch) -> None:
    """Reading all of the index takes a second for 100 M documents, in every worker."""
    prefix = write_files(tmp_path, index_bytes([2, 3], [0, 1, 2]))
    dataset = IndexedDataset(prefix)
    pickled = pickle.dumps(dataset)
    with monkeypatch.context() as patch:
        for check in ("_check_sequences", "_check_documents"):
            patch.delattr(IndexedDataset, check)
        copy = pickle.loads(pickled)  # noqa: S301, pickled here
    assert copy.num_tokens == 5 and np.array_equal(copy.tokens, dataset.tokens)
    for path, size in ((prefix.with_suffix(".bin"), 8), (prefix.with_suffix(".idx"), 40)):
        whole = path.read_bytes()
        path.write_bytes(whole[:size])
        with pytest.raises(InputError, match="truncated"):
            pickle.loads(pickled)  # noqa: S301, pickled here
        path.write_bytes(whole)


def test_best_dtype() -> None:
    assert best_dtype(65499) == np.uint16
    assert best_dtype(65500) == np.int32


def test_id_out_of_range_of_the_dtype(tmp_path: Path) -> None:
    for tokens, wrong in (([1, 65536, 2], 65536), ([-1], -1)):
        with (
            pytest.raises(InputError, match=rf"token id {wrong} does not fit.* uint16 .*0 to 65535"),
            IndexedDatasetWriter(tmp_path / "x", np.uint16) as writer,
        ):
            writer.add_document([tokens])
    assert list(tmp_path.iterdir()) == []


def test_files_are_renamed_when_complete(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "x", np.uint16) as writer:
        writer.add_document([[1]])
    with (
        pytest.raises(RuntimeError, match="interrupted"),
        IndexedDatasetWriter(tmp_path / "x", np.uint16) as writer,
    ):
        writer.add_document([[2]])
        assert IndexedDataset(tmp_path / "x").get(0).tolist() == [1]
        raise RuntimeError("interrupted")
    assert sorted(os.listdir(tmp_path)) == ["x.bin", "x.idx"]
    assert IndexedDataset(tmp_path / "x").get(0).tolist() == [1]


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no/x\.bin .*cannot be written: No such file"):
        IndexedDatasetWriter(tmp_path / "no" / "x", np.uint16).__enter__()


def test_missing_files_suggest_similar_names(tmp_path: Path) -> None:
    write_files(tmp_path, index_bytes([5], [0, 1]))
    for extension in (".idx", ".bin"):
        (tmp_path / f"x{extension}").rename(tmp_path / f"wiki_text_document{extension}")
    with pytest.raises(InputError, match=r"wiki\.idx does not exist: did you mean .*wiki_text_document\?"):
        IndexedDataset(tmp_path / "wiki")
    with pytest.raises(InputError, match=r"did you mean .*wiki_text_document\?"):
        IndexedDataset(tmp_path / "wikki_text_document")
    with pytest.raises(InputError, match=r"without the extension, .*wiki_text_document$"):
        IndexedDataset(tmp_path / "wiki_text_document.bin")
    with pytest.raises(InputError, match="there is no directory"):
        IndexedDataset(tmp_path / "none" / "wiki")
    (tmp_path / "wiki_text_document.bin").unlink()
    with pytest.raises(InputError, match=r"wiki_text_document\.bin does not exist"):
        IndexedDataset(tmp_path / "wiki_text_document")


@pytest.mark.parametrize(
    ("idx", "message"),
    [
        (b"", "not an index file"),
        (index_bytes([5], [0, 1])[:33], "not an index file"),
        (index_bytes([5], [0, 1], magic=b"TNTIDX\0\0\0"), "legacy 'cached' format"),
        (index_bytes([5], [0, 1], version=2), "unknown format version 2"),
        (index_bytes([5], [0, 1], code=7), "code 7 is a floating-point type"),
        (index_bytes([5], [0, 1], code=9), "code 9 is unknown"),
        (index_bytes([5], [0, 1])[:-1], "truncated or damaged"),
        (HEADER.pack(MAGIC, 1, 8, 2**63, 2**60), "lists 9223372036854775808 sequences"),
        (index_bytes([5, -1], [0, 1]), "sequence 1 has a negative size, -1"),
        (index_bytes([2, 3], [0, 2], itemsize=4), "sequence 1 should start at byte 4 .* not at byte 8"),
        (index_bytes([2, 3], [1, 2]), "run from 1 to 2, not from 0 to 2"),
        (index_bytes([2, 3], [0, 1]), "run from 0 to 1, not from 0 to 2"),
        (index_bytes([2, 3], []), "run over nothing"),
        (index_bytes([2, 3], [0, 2, 1, 2]), "document 1 ends before it starts, at sequence 1"),
        (
            index_bytes([2, 4], [0, 2]),
            r"x\.bin: 10 bytes, but .*x\.idx lists 6 uint16 tokens, 12 bytes",
        ),
    ],
)
def test_damaged_index(tmp_path: Path, idx: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        IndexedDataset(write_files(tmp_path, idx))
    assert str(tmp_path / "x") in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("sizes", [[2, 3], [5]])
def test_modes_of_multimodal_files_are_ignored(tmp_path: Path, caplog, sizes: list[int]) -> None:
    count = len(sizes)
    prefix = write_files(tmp_path, index_bytes(sizes, [0, count]) + bytes(range(count)))
    with caplog.at_level(logging.WARNING, "megatron"):
        assert IndexedDataset(prefix).sizes.tolist() == sizes
    assert "multimodal" in caplog.text
