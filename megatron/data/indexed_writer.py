"""Write token files (`megatron.data.indexed` describes the format)."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO

import numpy as np

from megatron.data.indexed import DTYPES, HEADER, MAGIC, IndexedDataset, chunks
from megatron.data.mapped import map_file
from megatron.errors import InputError

# Files that grow while documents are added: PREFIX.NAME.part. `sizes` and `documents` hold int32 values: tokens in each
# sequence, sequences in each document.
PARTS = ("sizes", "documents", "bin")
MAX_SEQUENCE = 2**31 - 1  # tokens


def best_dtype(vocab_size: int) -> np.dtype:
    """Return the dtype of Megatron-LM's token files: uint16 below 65,500 ids, int32 otherwise."""
    return DTYPES[8] if vocab_size < 65500 else DTYPES[4]


class IndexedDatasetWriter:
    """Context manager that writes PREFIX.idx and PREFIX.bin.

    The files are written under names that end in .part, synced to disk, and renamed when the block ends. If the block
    raises, existing files at PREFIX stay unchanged, and the new ones are removed unless `save` was called. Several
    writers replace their files together if all have finished (`finish`) before the first of their blocks ends.

    Args:
        prepare: called when all documents are added, to write what stands beside PREFIX.idx under temporary names.
            Returns a function that renames it, or removes an older one; it is called while there is no PREFIX.idx.
        lengths: result of the last `save` of a writer that was interrupted; this one continues from there.

    Raises:
        InputError: the files cannot be written, another process writes them, those of the interrupted writer are not
            there, or a token id does not fit `dtype`.
    """

    def __init__(
        self,
        prefix: str | os.PathLike[str],
        dtype: np.dtype | type,
        prepare: Callable[[], Callable[[], None]] | None = None,
        lengths: Sequence[int] | None = None,
    ) -> None:
        self.prefix = os.fspath(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._code = next(code for code, known in DTYPES.items() if known == self.dtype)
        self._prepare = prepare
        self._publish: Callable[[], None] = lambda: None
        self._lengths = lengths or (0,) * len(PARTS)
        self._keep = lengths is not None
        self._finished = False
        self._part = {name: f"{self.prefix}.{name}.part" for name in (*PARTS, "idx")}
        self._files: dict[str, BinaryIO] = {}
        self._open = contextlib.ExitStack()

    def __enter__(self) -> IndexedDatasetWriter:
        with self._writing(), contextlib.ExitStack() as stack:
            for name, length in zip(PARTS, self._lengths, strict=True):
                file = stack.enter_context(open(self._part[name], "ab"))
                if name == PARTS[0]:  # not the file that will be renamed
                    _lock(self.prefix, file)
                if os.fstat(file.fileno()).st_size < length:
                    raise InputError(
                        f"{self._part[name]} has fewer than the {length:,} bytes that an interrupted run wrote; remove "
                        f"{self.prefix}.*.part to start again"
                    )
                file.truncate(length)
                self._files[name] = file
            self._open = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._writing(), self._open:
            try:
                if kind is None:
                    self.finish()
                    self._rename()
                    self._keep = False
            finally:
                for path in [self._part["idx"]] if self._keep else self._part.values():
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(path)

    def finish(self) -> None:
        """Sync all documents to disk and write the index, so that the end of the block only renames the files."""
        if not self._finished:
            with self._writing():
                _sync(*self._files.values())
                self._write_index()
                if self._prepare is not None:
                    self._publish = self._prepare()
            self._finished = True

    def save(self) -> list[int]:
        """Sync the added documents to disk, and keep them if the block raises.

        Returns:
            `lengths` for a writer that continues from here.
        """
        with self._writing():
            _sync(*self._files.values())
        self._keep = True
        return [os.fstat(file.fileno()).st_size for file in self._files.values()]

    def add_document(self, sequences: Sequence[Sequence[int] | np.ndarray]) -> None:
        """Add one document, given as sequences of token ids."""
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
            tokens: integer [total], the ids of all sequences.
            sequence_sizes: [sequences], tokens in each sequence; they sum to `total`.
            sequences_per_document: [documents]; they sum to `sequences`.
        """
        sizes = np.asarray(sequence_sizes, dtype=np.int64)
        counts = np.asarray(sequences_per_document, dtype=np.int64)
        assert sizes.sum() == len(tokens) and counts.sum() == len(sizes)
        if len(sizes) and sizes.max() > MAX_SEQUENCE:
            raise InputError(
                f"{self.prefix}.idx: a sequence has {sizes.max()} tokens; the maximum is {MAX_SEQUENCE}"
            )
        ids = np.ascontiguousarray(self._as_dtype(tokens))
        with self._writing():
            self._files["bin"].write(ids.data)
            self._add_counts(sizes, counts)

    def add_dataset(self, dataset: IndexedDataset, copied: Callable[[int], None]) -> None:
        """Add all documents of a token file of the same dtype; report the bytes of each copied piece to `copied`."""
        assert dataset.dtype == self.dtype
        for part in chunks(dataset.num_tokens):
            with self._writing():
                self._files["bin"].write(dataset.tokens[part].data)
            copied((part.stop - part.start) * self.dtype.itemsize)
        with self._writing():
            for part in chunks(len(dataset)):
                self._add_counts(dataset.sizes[part], dataset.sizes[:0])
            for part in chunks(len(dataset.doc_idx) - 1):
                self._add_counts(dataset.sizes[:0], np.diff(dataset.doc_idx[part.start : part.stop + 1]))

    def _add_counts(self, sizes: np.ndarray, counts: np.ndarray) -> None:
        self._files["sizes"].write(sizes.astype("<i4").data)
        self._files["documents"].write(counts.astype("<i4").data)

    def _as_dtype(self, tokens: np.ndarray) -> np.ndarray:
        """Convert `tokens` to the file's dtype, checking that every id fits."""
        if tokens.dtype == self.dtype or len(tokens) == 0:
            return tokens.astype(self.dtype, copy=False)
        limits = np.iinfo(self.dtype)
        if tokens.min() < limits.min or tokens.max() > limits.max:
            wrong = tokens[np.argmax((tokens < limits.min) | (tokens > limits.max))]
            raise InputError(
                f"{self.prefix}.bin: token id {wrong} does not fit the file's {self.dtype.name} entries "
                f"({limits.min} to {limits.max}); the vocabulary is larger than declared"
            )
        return tokens.astype(self.dtype)

    def _write_index(self) -> None:
        sizes, counts = (map_file(self._part[name]).view("<i4") for name in ("sizes", "documents"))
        with open(self._part["idx"], "wb") as file:
            file.write(HEADER.pack(MAGIC, 1, self._code, len(sizes), len(counts) + 1))
            file.write(sizes.data)
            start = 0
            for part in chunks(len(sizes)):
                ends = start + np.cumsum(sizes[part], dtype=np.int64)
                file.write(((ends - sizes[part]) * self.dtype.itemsize).astype("<i8", copy=False).data)
                start = int(ends[-1])
            file.write(bytes(8))
            documents = 0
            for part in chunks(len(counts)):
                ends = documents + np.cumsum(counts[part], dtype=np.int64)
                file.write(ends.astype("<i8", copy=False).data)
                documents = int(ends[-1])
            _sync(file)

    def _rename(self) -> None:
        """Rename the files to their final names. An old index never stands beside new tokens, nor the reverse."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{self.prefix}.idx")
        self._publish()
        for kind in ("bin", "idx"):
            os.replace(self._part[kind], f"{self.prefix}.{kind}")
        folder = os.open(os.path.dirname(self.prefix) or ".", os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise InputError(f"{self.prefix}.bin and .idx cannot be written: {error.strerror}") from None


def _lock(prefix: str, file: BinaryIO) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(f"{prefix}.bin and .idx are being written by another process") from None
    except OSError:
        pass  # some network file systems have no locks


def _sync(*files: BinaryIO) -> None:
    for file in files:
        file.flush()
        os.fsync(file.fileno())
