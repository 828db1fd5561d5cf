"""Read documents from text files and datasets.

The name determines the format:

    *.txt           plain text: one document, or documents separated by blank lines
    *.parquet       table with a column for each key (needs pyarrow)
    hf:NAME         Hugging Face dataset with a column for each key (needs datasets)
    anything else   JSON lines: an object per line, with a text for each key

Text and JSON lines may be compressed, with .gz or .zst appended to the name.

Files are cut into batches of about a megabyte at document boundaries, which is cheap. `documents` parses a batch and
may run in another process.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple

from megatron.cli import clipped
from megatron.errors import InputError
from megatron.preprocessing import blocks
from megatron.preprocessing.hf_datasets import read_rows
from megatron.preprocessing.inputs import is_dataset, is_remote, open_input, reason

BATCH_ROWS = 256  # of a table
ROW_BYTES = 12  # counted for a row beside its text: as many as for {"text": ""}
TXT_DOCUMENTS = ("file", "blank-lines")  # what a document of plain text is
MAX_NAMES = 10  # listed in a message


class Position(NamedTuple):
    """The beginning of an input: the number of inputs before it, and their bytes and records."""

    inputs: int = 0
    read: int = 0
    records: int = 0


START = Position()


@dataclasses.dataclass(frozen=True)
class DocumentBatch:
    """Consecutive documents of one file.

    Attributes:
        kind: "jsonl", "rows", or of plain text "file" or "blank-lines".
        data: whole lines of text; for a table, a dict per row.
        first: number of the first line or row, counted from 1.
        read: bytes read from disk so far, over all files; of a dataset, which is no file, none.
        records: lines, rows or documents of plain text in this batch, with blank lines of "jsonl".
        before: records before this batch, over all files.
        file_start: beginning of the file.
    """

    file: str
    kind: str
    data: bytes | list[dict[str, Any]]
    first: int
    read: int
    records: int = 0
    before: int = 0
    file_start: Position = START


class Document(NamedTuple):
    """Text of each key, and its location (FILE:LINE)."""

    place: str
    texts: tuple[str, ...]


class _Unusable(Exception):
    """Record that is not a document, with the reason."""


def kind_of(path: str) -> tuple[str, str]:
    """Return a file's format (`DocumentBatch.kind`) and compression (".gz", ".zst" or "") from its name."""
    stem, compression = os.path.splitext(path)
    if compression not in blocks.DECOMPRESSORS:
        stem, compression = path, ""
    return {".txt": "txt", ".parquet": "parquet"}.get(os.path.splitext(stem)[1], "jsonl"), compression


def read_batches(
    addresses: Sequence[str],
    keys: Sequence[str],
    txt_documents: str = "file",
    start: Position = START,
) -> Iterator[DocumentBatch]:
    """Yield the batches of all inputs in order.

    Args:
        keys: columns to read from tables and datasets.
        txt_documents: what a document of plain text is, one of `TXT_DOCUMENTS`.
        start: `file_start` of the first batch to yield.

    Raises:
        InputError: an input is unreadable, truncated, or not of the format of its name.
    """
    _, read, before = start
    for number, address in enumerate(addresses[start.inputs :], start.inputs):
        batch, file_start = None, Position(number, read, before)
        for batch in _batches(address, keys, txt_documents):
            batch = dataclasses.replace(
                batch,
                read=file_start.read + batch.read,
                records=_records(batch),
                before=before,
                file_start=file_start,
            )
            before += batch.records
            yield batch
        read = batch.read if batch else read


def _batches(address: str, keys: Sequence[str], txt_documents: str) -> Iterator[DocumentBatch]:
    """Yield the batches of one input."""
    if is_dataset(address):
        yield from _dataset_batches(address, keys)
        return
    kind, compression = kind_of(address)
    if kind == "txt" and len(keys) > 1:
        raise InputError(f"--json-keys: {address} is plain text, which has no keys; give one key")
    try:
        with open_input(address) as file:
            if kind == "parquet":
                if compression:
                    raise InputError(f"{address}: compressed tables are not supported; decompress it first")
                yield from _table_batches(address, file, keys)
            else:
                kind = txt_documents if kind == "txt" else kind
                yield from _text_batches(address, kind, file, compression)
    except OSError as error:
        raise InputError(f"{address}: cannot be read: {error.strerror or reason(error)}") from None


def _records(batch: DocumentBatch) -> int:
    if not isinstance(batch.data, bytes):
        return len(batch.data)
    if batch.kind == "jsonl":
        return batch.data.count(b"\n") + (not batch.data.endswith(b"\n"))
    return sum(1 for _ in RECORDS[batch.kind](batch.data, batch.first))


def documents(
    batch: DocumentBatch, keys: Sequence[str], share: tuple[int, int] = (0, 1), done: int = 0
) -> tuple[list[Document], list[str]]:
    """Parse the documents of a batch; return them, and a message (FILE:LINE: ...) for each unusable one.

    Args:
        share: (i, n) takes the records whose number, counted from 0 over all files, is i modulo n.
        done: number of records, over all files, to leave out at the beginning.
    """
    records: Iterable[tuple[int, Any]]
    if isinstance(batch.data, bytes):
        records = RECORDS[batch.kind](batch.data, batch.first)
    else:
        records = enumerate(batch.data, start=batch.first)
    index, count = share
    begin = max(done - batch.before, 0)
    begin += (index - batch.before - begin) % count
    found, bad = [], []
    for number, record in itertools.islice(records, begin, None, count):
        if batch.kind == "jsonl" and not record.strip():
            continue
        place = f"{batch.file}:{number}"
        try:
            found.append(Document(place, _texts(record, batch.kind, keys)))
        except _Unusable as error:
            bad.append(f"{place}: {error}")
    return found, bad


def _texts(record: Any, kind: str, keys: Sequence[str]) -> tuple[str, ...]:
    """Return the texts of a record; raise _Unusable, with the reason, if it has none."""
    if isinstance(record, bytes):
        try:
            record = record.decode("utf-8")
        except UnicodeDecodeError as error:
            raise _Unusable(f"is not UTF-8 text: byte 0x{error.object[error.start]:02x}") from None
        if kind != "jsonl":
            return (record.replace("\r\n", "\n"),)
        record = _parsed(record)
        if not isinstance(record, dict):
            raise _Unusable(f"is not a JSON object but {_describe(record)}")
    return tuple(_text(record, key) for key in keys)


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        reason = f"{error.msg} (column {error.colno})"
    except (ValueError, RecursionError) as error:  # a number too long, brackets too deep
        reason = str(error)
    raise _Unusable(f"is not JSON: {reason}; each line must be an object (name plain text *.txt)")


def _text(record: dict[str, Any], key: str) -> str:
    if key not in record:
        raise _Unusable(f"has no key {clipped(key)}; its keys: {_listed(record)} (--json-keys)")
    text = record[key]
    if not isinstance(text, str):
        raise _Unusable(f"{key!r} is not text but {_describe(text)}")
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise _Unusable(f"{key!r} has a lone surrogate, U+{ord(text[error.start]):04X}") from None
    return text


def _listed(names: Collection[str]) -> str:
    """List names for a message: the first few, without the ends of long ones."""
    shown = ", ".join(map(clipped, itertools.islice(names, MAX_NAMES))) or "none"
    return shown if len(names) <= MAX_NAMES else f"{shown}, ... ({len(names):,} in all)"


def _describe(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    names |= {int: "a number", float: "a number"}
    return names.get(type(value), type(value).__name__)


def _lines(data: bytes, first: int) -> Iterator[tuple[int, bytes]]:
    return enumerate(data.split(b"\n"), start=first)


def _whole(data: bytes, first: int) -> Iterator[tuple[int, bytes]]:
    """Yield all text as one document, without the final line ends, unless it is blank."""
    if data and not data.isspace():
        yield first, data.rstrip(b"\r\n")


def _paragraphs(data: bytes, first: int) -> Iterator[tuple[int, bytes]]:
    """Yield each run of non-blank lines with the number of its first line, without the final line end."""
    start, begin, at = first, 0, 0  # `begin` is the position of line `start`
    for number, line in enumerate(io.BytesIO(data), start=first):
        at += len(line)
        if line.isspace():
            if begin < at - len(line):
                yield start, data[begin : at - len(line)].rstrip(b"\r\n")
            start, begin = number + 1, at
    if begin < at:
        yield start, data[begin:].rstrip(b"\r\n")


# Functions from (lines of text, number of the first) to the records, each with the number of its first line.
RECORDS: dict[str, Callable[[bytes, int], Iterator[tuple[int, bytes]]]] = {
    "jsonl": _lines,
    "blank-lines": _paragraphs,
    "file": _whole,
}


def _text_batches(path: str, kind: str, file: BinaryIO, compression: str) -> Iterator[DocumentBatch]:
    read = 0  # counted here, since a pipe does not tell

    def read_blocks() -> Iterator[bytes]:
        nonlocal read
        while block := _read(path, file):
            read += len(block)
            yield block

    text = read_blocks()
    if compression:
        text = blocks.decompressed(path, text, blocks.DECOMPRESSORS[compression])
    chunks = blocks.whole_lines(text)
    if kind != "jsonl":
        chunks = blocks.whole_file(chunks) if kind == "file" else blocks.whole_paragraphs(chunks)
    first = 1
    try:
        for chunk in chunks:
            yield DocumentBatch(
                path, kind, chunk.removeprefix(b"\xef\xbb\xbf") if first == 1 else chunk, first, read
            )
            first += chunk.count(b"\n")
    except blocks.TooLong as error:
        raise InputError(f"{path}:{error}") from None


def _read(path: str, file: BinaryIO) -> bytes:
    try:
        return file.read(blocks.BLOCK_BYTES)
    except Exception as error:
        if isinstance(error, OSError) and not is_remote(path):
            raise
        # Each protocol's library has its own exceptions.
        raise InputError(f"{path}: cannot be read to its end: {reason(error)}") from None


def _table_batches(path: str, file: BinaryIO, keys: Sequence[str]) -> Iterator[DocumentBatch]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise InputError(f"{path}: reading parquet files needs pyarrow: pip install pyarrow") from None
    if not file.seekable():
        raise InputError(
            f"{path}: parquet is read from its end, and this stream cannot seek; copy it to a disk"
        )
    try:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        schema = pyarrow.parquet.read_schema(file)
        missing = [key for key in keys if key not in schema.names]
        if missing:
            raise InputError(
                f"{path}: has no column {missing[0]!r}; its columns: {_listed(schema.names)} (--json-keys)"
            )
        for key in keys:
            if pyarrow.types.is_nested(kind := schema.field(key).type):
                raise InputError(f"{path}: column {key!r} is not text but {kind} (--json-keys)")
        # A dictionary stores a text once for all rows that have it, so that a small file may hold long rows.
        table = pyarrow.parquet.ParquetFile(file, read_dictionary=list(keys))
        rows, first, written = table.metadata.num_rows, 1, 0
        parts = table.iter_batches(batch_size=BATCH_ROWS, columns=list(keys))
        for part in itertools.chain.from_iterable(map(_slices, parts)):
            sizes = _text_bytes(part)
            if sizes[0] > blocks.MAX_BYTES:
                raise InputError(f"{path}:{blocks.TooLong('row', first)}")
            written += sum(sizes) + len(sizes) * ROW_BYTES
            blocks.check_expansion(path, size, written)
            last = first + part.num_rows - 1
            yield DocumentBatch(path, "rows", part.to_pylist(), first, size * last // rows)
            first = last + 1
    except Exception as error:
        expected = isinstance(error, pyarrow.ArrowException | UnicodeDecodeError | OSError)
        if isinstance(error, InputError) or not (expected or is_remote(path)):
            raise
        raise InputError(f"{path}: cannot be read as parquet: {reason(error)}") from None


def _dataset_batches(address: str, keys: Sequence[str]) -> Iterator[DocumentBatch]:
    first = 1
    for rows in read_rows(address, keys, BATCH_ROWS):
        begin = held = 0
        for end, row in enumerate(rows, start=1):
            size = sum(len(text) for text in row.values() if isinstance(text, str))
            if size > blocks.MAX_BYTES:
                raise InputError(f"{address}:{blocks.TooLong('row', first + end - 1)}")
            held += size
            if held > blocks.BATCH_BYTES or end == len(rows):
                yield DocumentBatch(address, "rows", rows[begin:end], first + begin, 0)
                begin, held = end, 0
        first += len(rows)


def _slices(part: Any) -> Iterator[Any]:
    """Cut a part of a table into slices of BATCH_BYTES of text or less, or of one row."""
    begin = held = 0
    for row, size in enumerate(_text_bytes(part)):
        if held + size > blocks.BATCH_BYTES and row > begin:
            yield part.slice(begin, row - begin)
            begin, held = row, 0
        held += size
    if part.num_rows:
        yield part.slice(begin)


def _text_bytes(part: Any) -> list[int]:
    """The bytes of text in each row of a part of a table, whose texts are in dictionaries."""
    import pyarrow.compute

    sizes = [0] * part.num_rows
    for column in part.columns:
        if hasattr(column, "dictionary"):
            lengths = pyarrow.compute.binary_length(column.dictionary).take(column.indices).to_pylist()
            sizes = [size + (length or 0) for size, length in zip(sizes, lengths, strict=True)]
    return sizes
