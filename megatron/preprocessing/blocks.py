"""Blocks of bytes of a text file: decompression, and chunks that end between lines or documents."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from megatron.errors import InputError

BLOCK_BYTES = 1 << 18  # per read
BATCH_BYTES = 1 << 20  # of text, decompressed
MAX_BYTES = 1 << 26  # of a line, or of a document of plain text
# Compressed bytes decompressed at once. They give at most 64 MiB: a block of 4 bytes may stand for 128 KiB (zstd).
COMPRESSED_BYTES = 1 << 11
# A file may expand to MAX_EXPANSION times its bytes, or to FREE_BYTES if that is more. Without a limit, a few kilobytes
# could keep a run reading for days. Compression shrinks real text to a third or a tenth.
MAX_EXPANSION = 1000
FREE_BYTES = 1 << 28


class TooLong(Exception):
    """Line or document longer than MAX_BYTES, with the number of its first line."""

    def __init__(self, unit: str, number: int) -> None:
        super().__init__(
            f"{number}: the {unit} that begins here has more than {MAX_BYTES >> 20} MiB; divide it"
            + (" (a file of several documents: --txt-documents blank-lines)" if unit == "file" else "")
        )


def whole_lines(blocks: Iterator[bytes]) -> Iterator[bytes]:
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
            raise TooLong("line", first + sum(part.count(b"\n") for part in held))
    if size:
        yield b"".join(held)


def whole_paragraphs(chunks: Iterator[bytes]) -> Iterator[bytes]:
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
            raise TooLong("document", first)
    if size:
        yield b"".join(held)


def whole_file(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Join all chunks."""
    held: list[bytes] = []
    size = 0
    for chunk in chunks:
        held.append(chunk)
        size += len(chunk)
        if size > MAX_BYTES:
            raise TooLong("file", 1)
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


def decompressed(path: str, blocks: Iterator[bytes], new: Callable[[], Any]) -> Iterator[bytes]:
    """Decompress a file of any number of concatenated streams, until it expands more than text does."""
    stream, read, written = None, 0, 0
    for part in _cut(blocks, COMPRESSED_BYTES):
        read += len(part)
        while part:
            stream = stream or new()
            try:
                data = stream.decompress(part)
            except Exception as error:  # each library has its own exceptions
                raise InputError(
                    f"{path}: cannot be decompressed: {str(error) or type(error).__name__}"
                ) from None
            written += len(data)
            check_expansion(path, read, written)
            yield from _cut([data], BLOCK_BYTES)
            part = stream.unused_data if stream.eof else b""
            stream = None if stream.eof else stream
    if stream:
        raise InputError(f"{path}: the compressed data ends early; the file is truncated")


def check_expansion(path: str, read: int, written: int) -> None:
    """Raise `InputError` if `read` bytes of a file expand to more than text does."""
    if written > max(MAX_EXPANSION * read, FREE_BYTES):
        raise InputError(
            f"{path}: {read:,} bytes expand to over {written:,}, more than {MAX_EXPANSION:,} times as many, which text "
            "does not; if it is meant, give the text uncompressed"
        )


def _cut(blocks: Iterable[bytes], size: int) -> Iterator[bytes]:
    """Cut blocks into pieces of at most `size` bytes."""
    for block in blocks:
        for begin in range(0, len(block), size):
            yield block[begin : begin + size]
