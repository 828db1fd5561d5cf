"""Token files: the .idx and .bin pair that Megatron-LM calls an indexed dataset.

PREFIX.bin holds the tokens of all sequences back to back, without header or separators. PREFIX.idx is little-endian
and unpadded, for S sequences in documents delimited by D = documents + 1 entries:

    9 bytes   magic "MMIDIDX\\0\\0"
    uint64    version, 1
    uint8     code of the token dtype (`DTYPES`)
    uint64    S
    uint64    D
    int32[S]  sizes: tokens in each sequence
    int64[S]  pointers: byte offset of each sequence in PREFIX.bin
    int64[D]  doc_idx: index of each document's first sequence; 0 first, S last

Megatron-LM's multimodal files end with S further bytes, one mode per sequence, which are ignored here.
"""

from __future__ import annotations

import difflib
import logging
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from megatron.data.mapped import map_file
from megatron.errors import InputError

logger = logging.getLogger("megatron")

MAGIC = b"MMIDIDX\x00\x00"
LEGACY_MAGIC = b"TNTIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
# Codes 6 and 7 are floating-point types, on whose widths versions of Megatron-LM disagree; tokens are integers.
DTYPES: dict[int, np.dtype] = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
CHUNK = 1 << 20  # entries processed at once: bounds memory, and few enough for the CPU caches


class IndexedDataset:
    """Sequences of PREFIX.idx and PREFIX.bin, read through memory maps.

    Pickles as its prefix and `num_tokens`, so a worker process maps the files itself and checks them no more.

    Attributes:
        dtype: dtype of the tokens.
        sizes: int32 [sequences], tokens in each sequence.
        doc_idx: int64 [documents + 1], index of each document's first sequence.
        tokens: [num_tokens] of `dtype`, the tokens of all sequences.
        num_tokens: number of tokens in the file.

    Raises:
        InputError: a file is missing, unreadable, in another format, or inconsistent.
    """

    def __init__(self, prefix: str | os.PathLike[str], num_tokens: int | None = None) -> None:
        """Map the files. With `num_tokens` only their sizes are checked: another process has read all of PREFIX.idx."""
        self.prefix = os.fspath(prefix)
        self.idx_path, self.bin_path = f"{self.prefix}.idx", f"{self.prefix}.bin"
        for path in (self.idx_path, self.bin_path):
            if not os.path.isfile(path):
                raise InputError(_missing_message(self.prefix, path))
        try:
            index, tokens = map_file(self.idx_path), map_file(self.bin_path)
        except OSError as error:
            raise InputError(f"{error.filename} cannot be read: {error.strerror}") from None
        self.dtype, sequences, entries = self._read_header(index)
        at = np.cumsum([HEADER.size, 4 * sequences, 8 * sequences, 8 * entries]).tolist()
        self.sizes = index[at[0] : at[1]].view("<i4")
        self._pointers = index[at[1] : at[2]].view("<i8")
        self.doc_idx = index[at[2] : at[3]].view("<i8")
        if num_tokens is None:
            num_tokens = self._check_sequences()
            self._check_documents()
        self.num_tokens = num_tokens
        expected = self.num_tokens * self.dtype.itemsize
        if len(tokens) != expected:
            raise InputError(
                f"{self.bin_path}: {len(tokens)} bytes, but {self.idx_path} lists {self.num_tokens} {self.dtype.name} "
                f"tokens, {expected} bytes; one of the files is truncated, or they do not belong together"
            )
        self.tokens = tokens.view(self.dtype)

    def __len__(self) -> int:
        return len(self.sizes)

    def __reduce__(self) -> tuple[type[IndexedDataset], tuple[str, int]]:
        return IndexedDataset, (self.prefix, self.num_tokens)

    def get(self, i: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Return `length` tokens of sequence `i` from `offset` on; by default the rest of the sequence.

        Returns:
            [length] of `self.dtype`, a read-only view of the mapped file.
        """
        size = int(self.sizes[i])
        length = size - offset if length is None else length
        assert 0 <= offset <= offset + length <= size, (i, offset, length, size)
        start = int(self._pointers[i]) // self.dtype.itemsize + offset
        return self.tokens[start : start + length]

    def out_of_vocabulary(
        self, spans: Iterable[tuple[int, int, int]], unit: str, sample: int, vocab_size: int
    ) -> InputError:
        """Return the error for a sample with a token id that is not in the vocabulary.

        Args:
            spans: sequence, offset and length of each piece of the sample.
            unit: what a sequence is: "document" or "sentence".
        """
        for sequence, offset, length in spans:
            ids = self.get(sequence, offset, length).astype(np.int64)
            invalid = (ids < 0) | (ids >= vocab_size)
            if invalid.any():
                at = int(np.argmax(invalid))
                return InputError(
                    f"{self.bin_path}: token {offset + at} of {unit} {sequence} (in sample {sample}) has id {ids[at]}, "
                    f"but the vocabulary has {vocab_size} ids; the file was made with another tokenizer, or is damaged"
                )
        raise AssertionError(f"every token of sample {sample} is in the vocabulary")

    def _read_header(self, index: np.ndarray) -> tuple[np.dtype, int, int]:
        """Check the header of the mapped .idx file; return the token dtype, S and D."""
        path = self.idx_path
        head = index[: HEADER.size].tobytes()
        if head.startswith(LEGACY_MAGIC):
            raise InputError(
                f"{path}: the legacy 'cached' format (TNTIDX) is not supported; "
                "preprocess the text again with megatron preprocess"
            )
        if len(head) < HEADER.size or not head.startswith(MAGIC):
            raise InputError(f"{path}: not an index file written by megatron preprocess (no MMIDIDX header)")
        _, version, code, sequences, entries = HEADER.unpack(head)
        if version != 1:
            raise InputError(f"{path}: unknown format version {version}; only version 1 is supported")
        if code not in DTYPES:
            kind = "a floating-point type" if code in (6, 7) else "unknown"
            names = ", ".join(f"{c} {d.name}" for c, d in DTYPES.items())
            raise InputError(f"{path}: token dtype code {code} is {kind}; tokens are integers ({names})")
        expected = HEADER.size + 12 * sequences + 8 * entries
        if len(index) == expected + sequences and sequences > 0:
            logger.warning("%s: multimodal file; the modes of its sequences are ignored", path)
        elif len(index) != expected:
            raise InputError(
                f"{path}: {len(index)} bytes long, but its header lists {sequences} sequences and {entries} "
                f"document entries, {expected} bytes; the file is truncated or damaged"
            )
        return DTYPES[code], sequences, entries

    def _check_sequences(self) -> int:
        """Check that the sequences lie back to back in the .bin file; return the number of tokens."""
        tokens = 0
        for part in chunks(len(self)):
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
                    f"{self.idx_path}: sequence {part.start + i} should start at byte {start} of the .bin file, where "
                    f"the one before ends, not at byte {self._pointers[part.start + i]}"
                )
            tokens = int(ends[-1])
        return tokens

    def _check_documents(self) -> None:
        """Check that `doc_idx` divides the sequences into documents."""
        path, doc_idx = self.idx_path, self.doc_idx
        if len(doc_idx) == 0 or doc_idx[0] != 0 or doc_idx[-1] != len(self):
            found = f"from {doc_idx[0]} to {doc_idx[-1]}" if len(doc_idx) else "over nothing"
            raise InputError(f"{path}: document boundaries run {found}, not from 0 to {len(self)} sequences")
        for part in chunks(len(doc_idx) - 1):
            wrong = doc_idx[part] > doc_idx[part.start + 1 : part.stop + 1]
            if wrong.any():
                i = part.start + int(np.argmax(wrong))
                raise InputError(f"{path}: document {i} ends before it starts, at sequence {doc_idx[i + 1]}")


def chunks(length: int) -> Iterator[slice]:
    """Cut range(length) into slices of CHUNK entries."""
    for start in range(0, length, CHUNK):
        yield slice(start, min(start + CHUNK, length))


def _missing_message(prefix: str, path: str) -> str:
    """Explain why there is no file at `path`, and suggest the nearest prefix that exists."""
    stem, extension = os.path.splitext(prefix)
    if extension in (".idx", ".bin"):
        return f"{path} does not exist: give the prefix without the extension, {stem}"
    folder = Path(prefix).parent
    if not folder.is_dir():
        return f"{path} does not exist: there is no directory {folder}"
    known = {p.stem for p in folder.glob("*.idx")} & {p.stem for p in folder.glob("*.bin")}
    name = Path(prefix).name
    near = sorted(k for k in known if k.startswith(name)) or difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {folder / near[0]}?" if near else f"no file in {folder} has a similar name"
    return f"{path} does not exist: {hint}"
