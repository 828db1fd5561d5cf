"""Read documents from text files.

The file name determines the format:

    *.txt           plain text; blank lines separate documents
    *.parquet       table with a column for each key (needs pyarrow)
    anything else   JSON lines: an object per line, with a text for each key

Text and JSON lines may be compressed, with .gz or .zst appended to the name.

Files are cut into batches of about a megabyte at document boundaries, which is cheap. `documents` parses a batch and
may run in another process.
"""

from __future__ import annotations

import dataclasses
import glob
import io
import itertools
import json
import os
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple

from megatron.cli import clipped
from megatron.errors import InputError

BLOCK_BYTES = 1 << 18  # per read
BATCH_BYTES = 1 << 20  # of text, decompressed
BATCH_ROWS = 256  # of a table
MAX_BYTES = 1 << 26  # of a line, or of a document of plain text
# Compressed bytes decompressed at once. They give at most 64 MiB: a block of 4 bytes may stand for 128 KiB (zstd).
COMPRESSED_BYTES = 1 << 11
MAX_NAMES = 10  # listed in a message


@dataclasses.dataclass(frozen=True)
class DocumentBatch:
    """Consecutive documents of one file.

    Attributes:
        kind: "jsonl", "txt" or "parquet".
        data: whole lines of text; for a table, a dict per row.
        first: number of the first line or row, counted from 1.
        read: bytes read from disk so far, over all files.
    """

    file: str
    kind: str
    data: bytes | list[dict[str, Any]]
    first: int
    read: int


class Document(NamedTuple):
    """Text of each key, and its location (FILE:LINE)."""

    place: str
    texts: tuple[str, ...]


class _Unusable(Exception):
    """Record that is not a document, with the reason."""


class _TooLong(Exception):
    """Line or document longer than MAX_BYTES, with the number of its first line."""

    def __init__(self, unit: str, number: int) -> None:
        super().__init__(
            f"{number}: the {unit} that begins here has more than {MAX_BYTES >> 20} MiB; divide it"
        )


def find_files(patterns: Sequence[str]) -> list[str]:
    """Expand --input: files in the given order, matches of a glob pattern sorted by name.

    Raises:
        InputError: a file does not exist, or a pattern matches none.
    """
    files = []
    for pattern in patterns:
        if os.path.isdir(pattern):
            raise InputError(f"--input: {pattern} is a directory; name the files, as in '{pattern}/*.jsonl'")
        found = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
        found = [path for path in found if not os.path.isdir(path)]
        if not found:
            is_glob = glob.has_magic(pattern)
            raise InputError(f"--input: {pattern} {'matches no file' if is_glob else 'does not exist'}")
        files += found
    return files


def kind_of(path: str) -> tuple[str, str]:
    """Return a file's format (`DocumentBatch.kind`) and compression (".gz", ".zst" or "") from its name."""
    stem, compression = os.path.splitext(path)
    if compression not in DECOMPRESSORS:
        stem, compression = path, ""
    return {".txt": "txt", ".parquet": "parquet"}.get(os.path.splitext(stem)[1], "jsonl"), compression


def read_batches(files: Sequence[str], keys: Sequence[str]) -> Iterator[DocumentBatch]:
    """Yield the batches of all files in order. `keys` are the columns to read from tables.

    Raises:
        InputError: a file is unreadable, truncated, or not of the format of its name.
    """
    before = 0
    for path in files:
        kind, compression = kind_of(path)
        if kind == "txt" and len(keys) > 1:
            raise InputError(f"--json-keys: {path} is plain text, which has no keys; give one key")
        try:
            with open(path, "rb") as file:
                if kind == "parquet":
                    if compression:
                        raise InputError(f"{path}: compressed tables are not supported; decompress it first")
                    batches = _table_batches(path, file, keys)
                else:
                    batches = _text_batches(path, kind, file, compression)
                for batch in batches:
                    yield dataclasses.replace(batch, read=before + batch.read)
                before += os.path.getsize(path)
        except OSError as error:
            raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None


def documents(batch: DocumentBatch, keys: Sequence[str]) -> tuple[list[Document], list[str]]:
    """Parse the documents of a batch; return them, and a message (FILE:LINE: ...) for each unusable one."""
    records: Iterable[tuple[int, Any]]
    if isinstance(batch.data, bytes):
        records = (_paragraphs if batch.kind == "txt" else _json_records)(batch.data, batch.first)
    else:
        records = enumerate(batch.data, start=batch.first)
    found, bad = [], []
    for number, record in records:
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
        if kind == "txt":
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
    return {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}.get(
        type(value), "a number"
    )


def _json_records(data: bytes, first: int) -> Iterator[tuple[int, bytes]]:
    for number, line in enumerate(data.split(b"\n"), start=first):
        if line.strip():
            yield number, line


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


def _text_batches(path: str, kind: str, file: BinaryIO, compression: str) -> Iterator[DocumentBatch]:
    blocks: Iterator[bytes] = iter(lambda: file.read(BLOCK_BYTES), b"")
    if compression:
        blocks = _decompressed(path, blocks, DECOMPRESSORS[compression])
    chunks = _whole_lines(blocks)
    if kind == "txt":
        chunks = _whole_paragraphs(chunks)
    first = 1
    try:
        for chunk in chunks:
            yield DocumentBatch(
                path, kind, chunk.removeprefix(b"\xef\xbb\xbf") if first == 1 else chunk, first, file.tell()
            )
            first += chunk.count(b"\n")
    except _TooLong as error:
        raise InputError(f"{path}:{error}") from None


def _whole_lines(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Regroup blocks into chunks of BATCH_BYTES or slightly more that end at a line end."""
    held: list[bytes] = []
    size, first = 0, 1  # bytes held, and the number of the first line in them
    for block in blocks:
        end = block.rfind(b"\n") + 1 if size + len(block) >= BATCH_BYTES else 0
        if end:
            whole = b"".join([*held, block[:end]])
            yield whole
            held, size, first = [], 0, first + whole.count(b"\n")
        held.append(block[end:])
        size += len(block) - end
        # A few short lines may precede the long one.
        if size > MAX_BYTES + BATCH_BYTES:
            raise _TooLong("line", first + sum(part.count(b"\n") for part in held))
    if size:
        yield b"".join(held)


def _whole_paragraphs(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Move the text after the last blank line of each chunk to the next chunk."""
    held: list[bytes] = []
    size, first = 0, 1  # bytes held, and the number of the first line in them
    for chunk in chunks:
        end = _end_of_last_blank_line(chunk)
        if end:
            whole = b"".join([*held, chunk[:end]])
            yield whole
            held, size, first = [], 0, first + whole.count(b"\n")
        held.append(chunk[end:])
        size += len(chunk) - end
        if size > MAX_BYTES:
            raise _TooLong("document", first)
    if size:
        yield b"".join(held)


def _end_of_last_blank_line(chunk: bytes) -> int:
    """Return the end of the last blank line; 0 if there is none."""
    end = len(chunk)
    while end:
        start = chunk.rfind(b"\n", 0, end - 1) + 1
        if chunk[start:end].isspace():
            return end
        end = start
    return 0


def _gzip() -> Any:
    return zlib.decompressobj(wbits=31)


def _zstd() -> Any:
    try:
        from compression.zstd import ZstdDecompressor  # Python 3.14

        return ZstdDecompressor()
    except ImportError:
        pass
    try:
        from zstandard import ZstdDecompressor
    except ImportError:
        raise InputError("reading .zst files needs zstandard: pip install zstandard") from None
    return ZstdDecompressor().decompressobj()


DECOMPRESSORS: dict[str, Callable[[], Any]] = {".gz": _gzip, ".zst": _zstd}


def _decompressed(path: str, blocks: Iterator[bytes], new: Callable[[], Any]) -> Iterator[bytes]:
    """Decompress a file of any number of concatenated streams."""
    stream = None
    for part in _cut(blocks, COMPRESSED_BYTES):
        while part:
            stream = stream or new()
            try:
                data = stream.decompress(part)
            except Exception as error:  # each library has its own exceptions
                raise InputError(
                    f"{path}: cannot be decompressed: {str(error) or type(error).__name__}"
                ) from None
            yield from _cut([data], BLOCK_BYTES)
            part = stream.unused_data if stream.eof else b""
            stream = None if stream.eof else stream
    if stream:
        raise InputError(f"{path}: the compressed data ends early; the file is truncated")


def _cut(blocks: Iterable[bytes], size: int) -> Iterator[bytes]:
    """Cut blocks into pieces of at most `size` bytes."""
    for block in blocks:
        for begin in range(0, len(block), size):
            yield block[begin : begin + size]


def _table_batches(path: str, file: BinaryIO, keys: Sequence[str]) -> Iterator[DocumentBatch]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise InputError(f"{path}: reading parquet files needs pyarrow: pip install pyarrow") from None
    try:
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
        size, rows, first = os.path.getsize(path), table.metadata.num_rows, 1
        parts = table.iter_batches(batch_size=BATCH_ROWS, columns=list(keys))
        for part in itertools.chain.from_iterable(map(_slices, parts)):
            if _text_bytes(part)[0] > MAX_BYTES:
                raise InputError(f"{path}:{_TooLong('row', first)}")
            last = first + part.num_rows - 1
            yield DocumentBatch(path, "parquet", part.to_pylist(), first, size * last // rows)
            first = last + 1
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        raise InputError(f"{path}: cannot be read as parquet: {' '.join(str(error).split())}") from None


def _slices(part: Any) -> Iterator[Any]:
    """Cut a part of a table into slices of BATCH_BYTES of text or less, or of one row."""
    begin = held = 0
    for row, size in enumerate(_text_bytes(part)):
        if held + size > BATCH_BYTES and row > begin:
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
