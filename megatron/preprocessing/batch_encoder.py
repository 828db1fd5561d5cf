"""Encode batches of documents, in a worker process."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megatron.errors import InputError
from megatron.preprocessing.documents import Document, DocumentBatch, Position, documents
from megatron.preprocessing.encoder import encoder
from megatron.preprocessing.sentences import split_sentences
from megatron.tokenizer import build_tokenizer
from megatron.tokenizer.config import TokenizerConfig

MAX_LISTED = 10  # bad lines listed in the report


@dataclasses.dataclass(frozen=True)
class EncoderSettings:
    """Settings of a worker."""

    tokenizer: TokenizerConfig
    engine: str
    keys: tuple[str, ...]
    split_sentences: bool
    keep_newlines: bool
    eod: int | None  # appended to each document unless None
    share: tuple[int, int] = (0, 1)  # of the records, as of `documents`
    done: int = 0  # as of `documents`


class Tokens(NamedTuple):
    """Encoded documents, as arguments of `IndexedDatasetWriter.add_documents`."""

    tokens: np.ndarray
    sequence_sizes: np.ndarray
    sequences_per_document: np.ndarray


class EncodedBatch(NamedTuple):
    """Result of a batch: `tokens` for each key; `bad` has the first of `bad_count` messages.

    `file_start` and `read` are those of the batch, and `records` counts the records up to its end, over all files.
    """

    file_start: Position
    read: int
    records: int
    text_bytes: int
    documents: int
    tokens: list[Tokens]
    bad_count: int
    bad: list[str]


class BatchEncoder:
    """Encoder of batches, in a worker process."""

    def __init__(self, settings: EncoderSettings) -> None:
        # Each worker has one core, so a thread pool in each would only add contention.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self.settings = settings
        self.encode = encoder(build_tokenizer(settings.tokenizer), settings.engine)

    def __call__(self, batch: DocumentBatch) -> EncodedBatch:
        found, bad = documents(batch, self.settings.keys, self.settings.share, self.settings.done)
        try:
            tokens = self._encode(found)
        except InputError:
            found, tokens, refused = self._encode_one_by_one(found)
            bad += refused
        return EncodedBatch(
            file_start=batch.file_start,
            read=batch.read,
            records=batch.before + batch.records,
            text_bytes=sum(len(t.encode()) for d in found for t in d.texts),
            documents=len(found),
            tokens=tokens,
            bad_count=len(bad),
            bad=bad[:MAX_LISTED],
        )

    def _encode(self, found: Sequence[Document]) -> list[Tokens]:
        return [self._encode_texts([d.texts[i] for d in found]) for i in range(len(self.settings.keys))]

    def _encode_one_by_one(self, found: Sequence[Document]) -> tuple[list[Document], list[Tokens], list[str]]:
        """Encode documents separately, to find those that the tokenizer rejects."""
        taken, refused = [], []
        for document in found:
            try:
                self._encode([document])
                taken.append(document)
            except InputError as error:
                refused.append(f"{document.place}: {error}")
        return taken, self._encode(taken), refused

    def _encode_texts(self, texts: list[str]) -> Tokens:
        """Encode documents. Sequences and documents without tokens are dropped."""
        settings = self.settings
        if settings.split_sentences:
            split = [split_sentences(text, keep_newlines=settings.keep_newlines) for text in texts]
        else:
            split = [[text] for text in texts]
        encoded = iter(self.encode(list(itertools.chain.from_iterable(split))))
        arrays: list[np.ndarray] = []
        sizes: list[int] = []
        counts: list[int] = []
        for sentences in split:
            ids = [a for a in itertools.islice(encoded, len(sentences)) if len(a)]
            if not ids:
                continue
            arrays += ids
            sizes += map(len, ids)
            counts.append(len(ids))
            if settings.eod is not None:
                arrays.append(np.array([settings.eod], dtype=np.uint32))
                sizes[-1] += 1
        tokens = np.concatenate(arrays) if arrays else np.empty(0, dtype=np.uint32)
        return Tokens(tokens, np.array(sizes, dtype=np.int64), np.array(counts, dtype=np.int64))
