"""Reading documents from text files, and errors with file and line."""

from __future__ import annotations

import contextlib
import gzip
import json
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.errors import InputError
from megatron.preprocessing import blocks
from megatron.preprocessing import documents as module
from megatron.preprocessing.documents import DocumentBatch, documents, read_batches

TEXTS = [f"document {i}\n" + "é漢 " * (i * 37 % 400) for i in range(100)]


def zstd(data: bytes) -> bytes:
    return pytest.importorskip("zstandard").ZstdCompressor().compress(data)


def read(
    *files: Path, keys: tuple[str, ...] = ("text",), txt_documents: str = "blank-lines"
) -> tuple[list[str], list[str]]:
    """Return the first text of each document, and all error messages."""
    texts, bad = [], []
    for batch in read_batches([str(f) for f in files], keys, txt_documents):
        found, wrong = documents(batch, keys)
        texts += [document.texts[0] for document in found]
        bad += wrong
    return texts, bad


def json_lines(texts: list[str]) -> bytes:
    return "".join(json.dumps({"id": 1, "text": t}, ensure_ascii=False) + "\n" for t in texts).encode()


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shrink blocks and batches, so that a few kilobytes of text cross every boundary."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 61)
    monkeypatch.setattr(blocks, "BATCH_BYTES", 200)
    monkeypatch.setattr(module, "BATCH_ROWS", 7)


@pytest.fixture(params=["plain", "gz", "zst", "gz in two streams", "zst in two streams"])
def compressed(request: pytest.FixtureRequest) -> Callable[[Path, bytes], Path]:
    """Function that writes a file in one of the compressions and returns its path."""

    def write(path: Path, data: bytes) -> Path:
        kind, _, two = request.param.partition(" in ")
        compress = {"plain": bytes, "gz": gzip.compress, "zst": zstd}[kind]
        parts = [data[: len(data) // 2], data[len(data) // 2 :]] if two else [data]
        path = path if kind == "plain" else path.with_name(f"{path.name}.{kind}")
        path.write_bytes(b"".join(map(compress, parts)))
        return path

    return write


def test_json_lines(tmp_path, compressed, small_batches):
    path = compressed(tmp_path / "a.jsonl", json_lines(TEXTS))
    assert read(path) == (TEXTS, [])
    batches = list(read_batches([str(path), str(path)], ["text"]))
    assert len(batches) >= 2
    assert batches[-1].read == 2 * path.stat().st_size
    assert [b.read for b in batches] == sorted(b.read for b in batches)


def test_plain_text(tmp_path, compressed, small_batches):
    paragraphs = [t.strip() for t in TEXTS]
    ends = random.Random(0).choices(["\n\n", "\n \t\n", "\n\n\n\n", "\r\n\r\n"], k=len(TEXTS))
    content = "\n\n" + "".join(p + end for p, end in zip(paragraphs, ends, strict=True))
    path = compressed(tmp_path / "a.txt", content.encode())
    assert read(path) == (paragraphs, [])


def test_a_file_of_plain_text_is_one_document(tmp_path, compressed, small_batches):
    path = compressed(tmp_path / "a.txt", b"\xef\xbb\xbfone\r\n\r\n  two\n\n\n" * 3 + b"\n")
    text = "one\n\n  two\n\n\n" + "\ufeffone\n\n  two\n\n\n\ufeffone\n\n  two"
    blank = compressed(tmp_path / "blank.txt", b"\n \n")
    assert read(path, blank, path, txt_documents="file") == ([text, text], [])
    (tmp_path / "bad.txt").write_bytes(b"good\n\nbad \xff\n")
    assert read(tmp_path / "bad.txt", txt_documents="file") == (
        [],
        [f"{tmp_path}/bad.txt:1: is not UTF-8 text: byte 0xff"],
    )


def test_a_file_of_plain_text_that_is_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "MAX_BYTES", 2 << 20)
    path = tmp_path / "a.txt"
    path.write_bytes(b"a line\n\n" * (3 << 17))
    with pytest.raises(
        InputError,
        match=rf"^{path}:1: the file that begins here has more than 2 MiB; divide it \(.*blank-lines\)$",
    ):
        read(path, txt_documents="file")
    assert len(read(path)[0]) == 3 << 17


def test_plain_text_of_one_document(tmp_path, small_batches):
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\r\n  two\r\n" * 100)
    assert read(path) == (["one\n  two\n" * 99 + "one\n  two"], [])


def test_parquet(tmp_path, small_batches):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    texts = TEXTS[:20] + [None] + TEXTS[20:]
    parquet.write_table(pyarrow.table({"n": range(len(texts)), "text": texts}), path, row_group_size=13)
    assert read(path) == (TEXTS, [f"{path}:21: 'text' is not text but null"])
    assert [b.read for b in read_batches([str(path)], ["text"])][-1] == path.stat().st_size
    with pytest.raises(
        InputError, match=r"a.parquet: has no column 'body'; its columns: 'n', 'text' \(--json-keys\)"
    ):
        read(path, keys=("body",))


def test_parquet_dictionaries(tmp_path, monkeypatch):
    """A file of a few hundred bytes may hold any number of long rows."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    texts = pyarrow.DictionaryArray.from_arrays([0, 1, None, 0] * 250, ["x" * 400_000, "y"])
    parquet.write_table(pyarrow.table({"text": texts}), path, compression="zstd", store_schema=False)
    assert path.stat().st_size < 1000
    sizes, rows = [], []
    for batch in read_batches([str(path)], ["text"]):
        sizes.append(sum(len(row["text"] or "") for row in batch.data))
        rows += [(row["text"] or "-")[0] for row in batch.data]
        assert len(rows) == batch.first + len(batch.data) - 1
    assert max(sizes) <= blocks.BATCH_BYTES and rows == ["x", "y", "-", "x"] * 250
    monkeypatch.setattr(blocks, "MAX_BYTES", 300_000)
    with pytest.raises(InputError, match=r"a.parquet:1: the row that begins here has more than"):
        list(read_batches([str(path)], ["text"]))
    parquet.write_table(pyarrow.table({"text": [1, 2]}), path)
    assert read(path)[1] == [
        f"{path}:1: 'text' is not text but a number",
        f"{path}:2: 'text' is not text but a number",
    ]
    parquet.write_table(pyarrow.table({"text": [b"ab"]}), path)
    assert read(path)[1] == [f"{path}:1: 'text' is not text but bytes"]
    parquet.write_table(pyarrow.table({"text": [["a", "b"]]}), path)
    with pytest.raises(
        InputError, match=r"a.parquet: column 'text' is not text but list<.*> \(--json-keys\)"
    ):
        list(read_batches([str(path)], ["text"]))


def test_several_keys(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": "1", "b": "2"}\n{"a": "3"}\n')
    (batch,) = read_batches([str(path)], ["b", "a"])
    found, bad = documents(batch, ["b", "a"])
    assert [d.texts for d in found] == [("2", "1")]
    assert bad == [f"{path}:2: has no key 'b'; its keys: 'a' (--json-keys)"]


def test_bad_lines(tmp_path):
    lines = {
        b'{"text": "good"}': None,
        b'{"text": "cut': "is not JSON: Unterminated string starting at (column 10); each line",
        b"": None,
        b"  \t": None,
        b"plain text": "is not JSON: Expecting value",
        b'["text"]': "is not a JSON object but a list",
        b"3": "is not a JSON object but a number",
        b"{}": "has no key 'text'; its keys: none",
        b'{"Text": "x", "id": 2}': "has no key 'text'; its keys: 'Text', 'id'",
        b'{"text": null}': "'text' is not text but null",
        b'{"text": 3.5}': "'text' is not text but a number",
        b'{"text": ["a"]}': "'text' is not text but a list",
        b'{"text": "\xff"}': "is not UTF-8 text: byte 0xff",
        b'{"text": "half \\ud83d"}': "'text' has a lone surrogate, U+D83D",
        b'{"text": ' + b"[" * 100_000: "is not JSON: ",
        b'{"text": ' + b"9" * 5000 + b"}": "",
        b'{"text": "\\ud83d\\ude00"}\r': None,
    }
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b"\n".join(lines))
    texts, bad = read(path)
    assert texts == ["good", "😀"]
    expected = [
        f"{path}:{n}: {reason}" for n, reason in enumerate(lines.values(), start=1) if reason is not None
    ]
    assert len(bad) == len(expected)
    for message, beginning in zip(bad, expected, strict=True):
        assert message.startswith(beginning)


def test_line_numbers_continue_across_batches(tmp_path, small_batches):
    for name, bad_line in (("a.jsonl", b"{bad}\n"), ("a.txt", b"\nbad \xff\n\n")):
        lines = [b'{"text": "good"}\n\n'] * 100
        lines[60] = bad_line
        path = tmp_path / name
        path.write_bytes(b"".join(lines))
        texts, bad = read(path)
        assert len(texts) == 99
        number = 2 * 60 + (2 if name == "a.txt" else 1)
        assert len(bad) == 1 and bad[0].startswith(f"{path}:{number}: is not ")


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_truncated_compressed_file(tmp_path, suffix):
    data = random.Random(0).randbytes(3000).hex().encode()
    whole = gzip.compress(data) if suffix == "gz" else zstd(data)
    path = tmp_path / f"a.txt.{suffix}"
    for length in (1, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(InputError, match=f"{path}: the compressed data ends early"):
            read(path)
    path.write_bytes(whole + b"garbage")
    with pytest.raises(InputError, match=f"{path}: cannot be decompressed"):
        read(path)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.txt.zst", "a.parquet"])
def test_file_that_does_not_match_its_suffix(tmp_path, name):
    pytest.importorskip({"gz": "zlib", "zst": "zstandard", "uet": "pyarrow"}[name[-3:].lstrip(".")])
    path = tmp_path / name
    path.write_bytes(b'{"text": "not compressed"}\n')
    with pytest.raises(InputError, match=f"{path}: cannot be "):
        read(path)


def test_damaged_files_give_documents_or_one_line(tmp_path):
    """Truncated and bit-flipped files may give other text, but no other exception."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    lines = json_lines(TEXTS[:30])
    parquet.write_table(pyarrow.table({"text": TEXTS[:30]}), tmp_path / "a.parquet")
    good = {
        "a.jsonl": lines,
        "a.jsonl.gz": gzip.compress(lines),
        "a.jsonl.zst": zstd(lines),
        "a.txt": lines,
        "a.parquet": (tmp_path / "a.parquet").read_bytes(),
    }
    rng = random.Random(0)
    for trial in range(200):
        name = rng.choice(list(good))
        data = bytearray(good[name])
        if trial % 2:
            del data[rng.randrange(len(data)) :]
        else:
            for _ in range(rng.randint(1, 4)):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        (tmp_path / name).write_bytes(data)
        try:
            _, messages = read(tmp_path / name)
        except InputError as error:
            messages = [str(error)]
        for message in messages:
            assert message.startswith(str(tmp_path / name)) and "\n" not in message


def test_unreadable_files(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(InputError, match="plain text, which has no keys; give one key"):
        list(read_batches([str(tmp_path / "a.txt")], ["a", "b"]))
    with pytest.raises(InputError, match=r"gone.jsonl: cannot be read: No such file"):
        list(read_batches([str(tmp_path / "gone.jsonl")], ["text"]))
    (tmp_path / "a.parquet.gz").touch()
    with pytest.raises(InputError, match=r"a.parquet.gz: compressed tables are not supported"):
        list(read_batches([str(tmp_path / "a.parquet.gz")], ["text"]))


def test_a_batch_can_be_sent_to_another_process():
    batch = DocumentBatch("a.jsonl", "jsonl", b'{"text": "x"}', 5, 0)
    assert documents(batch, ["text"])[0] == [("a.jsonl:5", ("x",))]


def test_errors_quote_little_of_a_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(
        json.dumps({f"key{i}": i for i in range(100_000)}) + "\n" + json.dumps({"k" * 10**6: 1}) + "\n"
    )
    _, (many, long) = read(path)
    assert many.startswith(f"{path}:1: has no key 'text'; its keys: 'key0', 'key1', ")
    assert many.endswith("'key9', ... (100,000 in all) (--json-keys)")
    assert long.endswith(f"its keys: '{'k' * 60}... (--json-keys)")


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_a_line_or_document_that_is_too_long(tmp_path, monkeypatch, suffix):
    """Its length is bounded before all of it is in memory."""
    compress = {"": bytes, ".gz": gzip.compress, ".zst": zstd}[suffix]
    monkeypatch.setattr(blocks, "MAX_BYTES", 2 << 20)
    line = b'{"text": "x"}\n'
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(compress(line * 70 + b'{"text": "' + b"x" * (120 << 20)))
    tracemalloc.start()
    with pytest.raises(
        InputError, match=f"^{path}:71: the line that begins here has more than 2 MiB; divide it$"
    ):
        read(path)
    assert tracemalloc.get_traced_memory()[1] < 80 << 20
    tracemalloc.stop()
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(compress(b"short\n\n" + b"a line\n" * (3 << 17)))
    with pytest.raises(
        InputError, match=f"^{path}:3: the document that begins here has more than 2 MiB; divide it$"
    ):
        read(path)
    path.write_bytes(compress(b"short\n\n" + b"a line\n" * (1 << 17) + b"x" * (4 << 20)))
    with pytest.raises(
        InputError, match=f"^{path}:{3 + (1 << 17)}: the line that begins here has more than 2 MiB"
    ):
        read(path)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed_blank_lines_take_little_memory(tmp_path, suffix):
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes((gzip.compress if suffix == ".gz" else zstd)(b"\n" * (40 << 20)))
    largest = max(len(batch.data) for batch in read_batches([str(path)], ["text"]))
    assert largest <= blocks.BATCH_BYTES + blocks.BLOCK_BYTES


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_file_that_expands_too_much(tmp_path, monkeypatch, suffix):
    compress = gzip.compress if suffix == ".gz" else zstd
    monkeypatch.setattr(blocks, "FREE_BYTES", 1 << 20)
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(compress(b"\n" * (1 << 20)))
    assert read(path) == ([], [])
    path.write_bytes(compress(b"\n" * (20 << 20)))
    expands = rf"^{path}: [\d,]+ bytes expand to over [\d,]+, more than 1,000 times as many"
    with pytest.raises(InputError, match=expands):
        read(path)


def test_a_table_that_expands_too_much(tmp_path, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(blocks, "FREE_BYTES", 1 << 20)
    path = tmp_path / "a.parquet"
    for count, is_right in ((100, True), (200_000, False)):
        texts = pyarrow.array(["x" * 1000] * count).dictionary_encode()
        parquet.write_table(pyarrow.table({"text": texts}), path, compression="zstd")
        with (
            contextlib.nullcontext()
            if is_right
            else pytest.raises(InputError, match=rf"^{path}: [\d,]+ bytes expand to over")
        ):
            assert len(read(path)[0]) == count


def test_an_exception_without_a_text_is_named(tmp_path, monkeypatch):
    class Broken:
        def decompress(self, data: bytes) -> bytes:
            raise MemoryError

    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b"{}"))
    monkeypatch.setitem(blocks.DECOMPRESSORS, ".gz", Broken)
    with pytest.raises(InputError, match="cannot be decompressed: MemoryError"):
        read(path)
