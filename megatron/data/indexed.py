"""Token files: the .idx and .bin pair that Megatron-LM calls an indexed dataset.

PREFIX.bin holds the tokens of all sequences, one after the other, without header or separators. PREFIX.idx is
little-endian and unpadded, for S sequences in documents delimited by D = documents + 1 entries:

    9 bytes   magic "MMIDIDX\\0\\0"
    uint64    version, 1
    uint8     code of the token dtype (`DTYPES`)
    uint64    S
    uint64    D
    int32[S]  sizes: tokens in each sequence
    int64[S]  pointers: byte offset of each sequence in PREFIX.bin
    int64[D]  doc_idx: sequences before each document; 0 first, S last

Multimodal files of Megatron-LM end with S further bytes, one mode per sequence, which are not used here.
"""

from __future__ import annotations

import array
import contextlib
import difflib
import logging
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from megatron.flags import InputError

logger = logging.getLogger("megatron")

MAGIC = b"MMIDIDX\x00\x00"
LEGACY_MAGIC = b"TNTIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
# Codes 6 and 7 are floating-point types, on whose widths versions of Megatron-LM disagree; tokens are integers.
DTYPES = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
CHUNK = 1 << 20  # entries looked at or written at once, which bounds memory for any number of sequences
MAX_SEQUENCE = 2**31 - 1


def best_dtype(vocab_size: int) -> np.dtype:
    """The dtype Megatron-LM gives a token file: uint16 below 65,500 ids, int32 otherwise."""
    return DTYPES[8] if vocab_size < 65500 else DTYPES[4]


class IndexedDataset:
    """The sequences of PREFIX.idx and PREFIX.bin, read through memory maps.

    Pickles as its prefix, so that a worker process opens the files anew.

    Attributes:
        dtype: dtype of the tokens.
        sizes: int32 [sequences], tokens in each sequence.
        doc_idx: int64 [documents + 1], sequences before each document.
        tokens: [num_tokens] of `dtype`, those of all sequences one after the other.
        num_tokens: tokens in all sequences together.

    Raises:
        InputError: a file is missing, unreadable, of another format, or inconsistent.
    """

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        self.prefix = os.fspath(prefix)
        self.idx_path, self.bin_path = f"{self.prefix}.idx", f"{self.prefix}.bin"
        for path in (self.idx_path, self.bin_path):
            if not os.path.isfile(path):
                raise InputError(_missing_message(self.prefix, path))
        index = _map(self.idx_path)
        self.dtype, sequences, entries = self._read_header(index)
        at = np.cumsum([HEADER.size, 4 * sequences, 8 * sequences, 8 * entries]).tolist()
        self.sizes = index[at[0] : at[1]].view("<i4")
        self._pointers = index[at[1] : at[2]].view("<i8")
        self.doc_idx = index[at[2] : at[3]].view("<i8")
        self.num_tokens = self._check_sequences()
        self._check_documents()
        expected = self.num_tokens * self.dtype.itemsize
        found = os.path.getsize(self.bin_path)
        if found != expected:
            raise InputError(
                f"{self.bin_path}: {found} bytes long, but {self.idx_path} counts {self.num_tokens} tokens of "
                f"{self.dtype.name}, {expected} bytes; a file was cut short or the two do not belong together"
            )
        self.tokens = _map(self.bin_path).view(self.dtype)

    def __len__(self) -> int:
        return len(self.sizes)

    def __reduce__(self) -> tuple[type[IndexedDataset], tuple[str]]:
        return IndexedDataset, (self.prefix,)

    def get(self, i: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """`length` tokens (default: all that follow) of sequence `i` from its token `offset` on.

        Returns a read-only view of the mapped file, [length] of `self.dtype`.
        """
        size = int(self.sizes[i])
        length = size - offset if length is None else length
        assert 0 <= offset <= offset + length <= size, (i, offset, length, size)
        start = int(self._pointers[i]) // self.dtype.itemsize + offset
        return self.tokens[start : start + length]

    def _read_header(self, index: np.ndarray) -> tuple[np.dtype, int, int]:
        """Check the header of the mapped .idx file; the token dtype, S and D."""
        path = self.idx_path
        head = index[: HEADER.size].tobytes()
        if head.startswith(LEGACY_MAGIC):
            raise InputError(
                f"{path}: in the old 'cached' format (TNTIDX), which is not read here; "
                "preprocess the text again with tools/preprocess_data.py"
            )
        if len(head) < HEADER.size or not head.startswith(MAGIC):
            raise InputError(
                f"{path}: not an index file made by tools/preprocess_data.py (no MMIDIDX header)"
            )
        _, version, code, sequences, entries = HEADER.unpack(head)
        if version != 1:
            raise InputError(f"{path}: format version {version} is not known; only version 1 is")
        if code not in DTYPES:
            kind = "a floating-point type" if code in (6, 7) else "not known"
            names = ", ".join(f"{c} {d.name}" for c, d in DTYPES.items())
            raise InputError(
                f"{path}: token dtype code {code} is {kind}; token files hold integers ({names})"
            )
        expected = HEADER.size + 12 * sequences + 8 * entries
        if len(index) == expected + sequences and sequences > 0:
            logger.warning("%s: multimodal; the mode of each sequence is not used", path)
        elif len(index) != expected:
            raise InputError(
                f"{path}: {len(index)} bytes long, but its header announces {sequences} sequences and {entries} "
                f"document entries, {expected} bytes; the file was cut short or altered"
            )
        return DTYPES[code], sequences, entries

    def _check_sequences(self) -> int:
        """Check that the sequences lie in the .bin file one after the other; the number of tokens in all."""
        tokens = 0
        for part in _chunks(len(self)):
            sizes = self.sizes[part]
            if sizes.min() < 0:
                i = part.start + int(np.argmax(sizes < 0))
                raise InputError(f"{self.idx_path}: sequence {i} has a negative size, {self.sizes[i]}")
            ends = tokens + np.cumsum(sizes, dtype=np.int64)
            wrong = self._pointers[part] != (ends - sizes) * self.dtype.itemsize
            if wrong.any():
                i = int(np.argmax(wrong))
                start = int(ends[i] - sizes[i]) * self.dtype.itemsize
                raise InputError(
                    f"{self.idx_path}: sequence {part.start + i} is said to start at byte "
                    f"{self._pointers[part.start + i]} of the .bin file, but those before it end at byte {start}"
                )
            tokens = int(ends[-1])
        return tokens

    def _check_documents(self) -> None:
        """Check that `doc_idx` divides the sequences into documents."""
        path, doc_idx = self.idx_path, self.doc_idx
        if len(doc_idx) == 0 or doc_idx[0] != 0 or doc_idx[-1] != len(self):
            ends = f"from {doc_idx[0]} to {doc_idx[-1]}" if len(doc_idx) else "over nothing"
            raise InputError(f"{path}: document boundaries run {ends}, not from 0 to {len(self)} sequences")
        for part in _chunks(len(doc_idx) - 1):
            wrong = doc_idx[part] > doc_idx[part.start + 1 : part.stop + 1]
            if wrong.any():
                i = part.start + int(np.argmax(wrong))
                raise InputError(f"{path}: document {i} ends at sequence {doc_idx[i + 1]}, before its start")


class IndexedDatasetWriter:
    """Writes PREFIX.idx and PREFIX.bin; a context manager.

    The files are written under temporary names beside the final ones, flushed to disk, and renamed when the
    block ends. If it ends by an exception they are removed, and files of these names stay as they were.

    Memory: 8 bytes per sequence at most (in documents of one sequence each).

    Raises:
        InputError: the files cannot be written, or a token id does not fit `dtype`.
    """

    def __init__(self, prefix: str | os.PathLike[str], dtype: np.dtype | type) -> None:
        self.prefix = os.fspath(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._code = next(code for code, known in DTYPES.items() if known == self.dtype)
        self._sizes = array.array("i")
        self._sequences_per_document = array.array("i")
        self._temporary = {kind: f"{self.prefix}.{kind}.{os.getpid()}.tmp" for kind in ("bin", "idx")}

    def __enter__(self) -> IndexedDatasetWriter:
        with self._writing():
            self._bin = open(self._temporary["bin"], "wb")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        try:
            with self._writing(), self._bin:
                if kind is None:
                    _to_disk(self._bin)
            if kind is None:
                with self._writing():
                    self._write_index()
                    self._rename()
        finally:
            for path in self._temporary.values():
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)

    def add_document(self, sequences: Sequence[Sequence[int] | np.ndarray]) -> None:
        """Add one document of these sequences of token ids."""
        arrays = [np.asarray(s, dtype=None if len(s) else self.dtype) for s in sequences]
        tokens = np.concatenate(arrays) if arrays else np.empty(0, self.dtype)
        self.add_documents(tokens, [len(s) for s in arrays], [len(arrays)])

    def add_documents(
        self,
        tokens: np.ndarray,
        sequence_sizes: Sequence[int] | np.ndarray,
        sequences_per_document: Sequence[int] | np.ndarray,
    ) -> None:
        """Add many documents at once.

        Args:
            tokens: integer [total], the ids of all sequences one after the other.
            sequence_sizes: [sequences], tokens in each; they sum to `total`.
            sequences_per_document: [documents]; they sum to `sequences`.
        """
        sizes = np.asarray(sequence_sizes, dtype=np.int64)
        counts = np.asarray(sequences_per_document, dtype=np.int64)
        assert sizes.sum() == len(tokens) and counts.sum() == len(sizes)
        if len(sizes) and sizes.max() > MAX_SEQUENCE:
            raise InputError(
                f"{self.prefix}.idx: a sequence of {sizes.max()} tokens; {MAX_SEQUENCE} is the most"
            )
        ids = np.ascontiguousarray(self._fitting(tokens))
        with self._writing():
            self._bin.write(ids.data)
        self._sizes.frombytes(sizes.astype(np.int32).tobytes())
        self._sequences_per_document.frombytes(counts.astype(np.int32).tobytes())

    def add_dataset(self, dataset: IndexedDataset, copied: Callable[[int], None]) -> None:
        """Add all documents of files of the same dtype; `copied` is told of the bytes of tokens, a piece at a time."""
        assert dataset.dtype == self.dtype
        for part in _chunks(dataset.num_tokens):
            with self._writing():
                self._bin.write(dataset.tokens[part].data)
            copied((part.stop - part.start) * self.dtype.itemsize)
        for part in _chunks(len(dataset)):
            self._sizes.frombytes(dataset.sizes[part].astype(np.int32).tobytes())
        for part in _chunks(len(dataset.doc_idx) - 1):
            counts = np.diff(dataset.doc_idx[part.start : part.stop + 1])
            self._sequences_per_document.frombytes(counts.astype(np.int32).tobytes())

    def _fitting(self, tokens: np.ndarray) -> np.ndarray:
        """`tokens` in the dtype of the file, none of them changed by that."""
        if tokens.dtype == self.dtype or len(tokens) == 0:
            return tokens.astype(self.dtype, copy=False)
        limits = np.iinfo(self.dtype)
        if tokens.min() < limits.min or tokens.max() > limits.max:
            wrong = tokens[np.argmax((tokens < limits.min) | (tokens > limits.max))]
            raise InputError(
                f"{self.prefix}.bin: token id {wrong} does not fit the file's {self.dtype.name} entries "
                f"({limits.min} to {limits.max}); the vocabulary is larger than was announced"
            )
        return tokens.astype(self.dtype)

    def _write_index(self) -> None:
        sizes = np.frombuffer(self._sizes, dtype=np.int32)
        counts = np.frombuffer(self._sequences_per_document, dtype=np.int32)
        with open(self._temporary["idx"], "wb") as file:
            file.write(HEADER.pack(MAGIC, 1, self._code, len(sizes), len(counts) + 1))
            file.write(sizes.astype("<i4", copy=False).data)
            start = 0
            for part in _chunks(len(sizes)):
                ends = start + np.cumsum(sizes[part], dtype=np.int64)
                file.write(((ends - sizes[part]) * self.dtype.itemsize).astype("<i8", copy=False).data)
                start = int(ends[-1])
            file.write(bytes(8))
            documents = 0
            for part in _chunks(len(counts)):
                ends = documents + np.cumsum(counts[part], dtype=np.int64)
                file.write(ends.astype("<i8", copy=False).data)
                documents = int(ends[-1])
            _to_disk(file)

    def _rename(self) -> None:
        """Give the files their names. No moment pairs an old index with new tokens or the reverse."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{self.prefix}.idx")
        for kind in ("bin", "idx"):
            os.replace(self._temporary[kind], f"{self.prefix}.{kind}")
        folder = os.open(os.path.dirname(self.prefix) or ".", os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise InputError(f"{self.prefix}.bin and .idx cannot be written: {error.strerror}") from None


def _chunks(length: int) -> Iterator[slice]:
    for start in range(0, length, CHUNK):
        yield slice(start, min(start + CHUNK, length))


def _map(path: str) -> np.ndarray:
    """The bytes of a file as a read-only uint8 array backed by a memory map."""
    try:
        if os.path.getsize(path) == 0:
            return np.empty(0, dtype=np.uint8)  # an empty file cannot be mapped
        return np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None


def _to_disk(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _missing_message(prefix: str, path: str) -> str:
    """Why there is no file at `path`, with the nearest prefix of which there are files."""
    stem, extension = os.path.splitext(prefix)
    if extension in (".idx", ".bin"):
        return f"{path} does not exist: give the prefix without the extension, {stem}"
    folder = Path(prefix).parent
    if not folder.is_dir():
        return f"{path} does not exist: there is no folder {folder}"
    known = {p.stem for p in folder.glob("*.idx")} & {p.stem for p in folder.glob("*.bin")}
    name = Path(prefix).name
    near = sorted(k for k in known if k.startswith(name)) or difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {folder / near[0]}?" if near else f"no file in {folder} has a name like it"
    return f"{path} does not exist: {hint}"
