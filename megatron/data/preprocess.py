"""Text files to token files.

This process reads the input in batches of whole documents and writes the results; worker processes parse each batch,
split it into sentences if asked, and encode it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron.data.documents import BATCH_BYTES, Batch, Document, documents, find_files, kind_of, read_batches
from megatron.data.indexed import IndexedDatasetWriter, best_dtype
from megatron.data.progress import Progress
from megatron.data.sentences import split_sentences
from megatron.data.workers import map_in_order
from megatron.flags import Config, InputError, flag
from megatron.tokenizer import Tokenizer, build_tokenizer
from megatron.tokenizer.config import TokenizerConfig
from megatron.tokenizer.engine import choose_engine, encoder

SAMPLE_CHARACTERS = 300_000  # on which engines are compared
SHOWN = 10  # bad lines that are listed


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreprocessConfig(Config):
    """What to read, how to cut it, where to write it."""

    input: tuple[str, ...] | None = flag(
        None,
        "files or glob patterns: JSON lines; *.txt, plain text whose documents are separated by blank lines; "
        "*.parquet; the first two also as *.gz or *.zst",
        nargs="+",
        required=True,
        metavar="FILE",
    )
    json_keys: tuple[str, ...] = flag(
        ("text",),
        "keys (or columns) whose texts are taken, each into files of its own (default: text)",
        nargs="+",
        aliases=("--json-key",),
        metavar="KEY",
    )
    on_bad_line: str = flag(
        "stop",
        "what to do on a line that holds no such text: stop, or skip and list it",
        choices=("stop", "skip"),
    )
    split_sentences: bool = flag(
        False, "make each sentence a sequence, as BERT needs, instead of each document"
    )
    keep_newlines: bool = flag(False, "keep the white space between sentences when splitting")
    lang: str = flag("english", "language whose rules split sentences", choices=("english",))
    append_eod: bool = flag(False, "end each document with the end-of-document token, as GPT needs")
    output_prefix: str | None = flag(
        None,
        "files are written as PREFIX_KEY_document.bin and .idx (or _sentence)",
        metavar="PREFIX",
        required=True,
    )
    dataset_impl: str = flag("mmap", "format of the files", choices=("mmap",))
    workers: int | None = flag(None, "processes that encode (default: one for each core)", low=1)
    log_interval: int = flag(10_000, "documents between two lines of progress, off a terminal", low=1)


@dataclasses.dataclass(frozen=True)
class EncoderSettings:
    """What a worker needs to know."""

    tokenizer: TokenizerConfig
    engine: str
    keys: tuple[str, ...]
    split_sentences: bool
    keep_newlines: bool
    eod: int | None  # appended to each document if given


class Tokens(NamedTuple):
    """Encoded documents: the arguments of `IndexedDatasetWriter.add_documents`."""

    tokens: np.ndarray
    sequence_sizes: np.ndarray
    sequences_per_document: np.ndarray


class EncodedBatch(NamedTuple):
    """The result of a batch; `tokens` has an entry for each key, `bad` the first messages of `bad_count`."""

    read: int
    text_bytes: int
    documents: int
    tokens: list[Tokens]
    bad_count: int
    bad: list[str]


class BatchEncoder:
    """Encodes batches, in a worker process."""

    def __init__(self, settings: EncoderSettings) -> None:
        # Each worker has one core; a pool of threads in each would only make them wait for one another.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self.settings = settings
        self.encode = encoder(build_tokenizer(settings.tokenizer), settings.engine)

    def __call__(self, batch: Batch) -> EncodedBatch:
        found, bad = documents(batch, self.settings.keys)
        try:
            tokens = self._encode(found)
        except InputError:
            found, tokens, refused = self._encode_one_by_one(found)
            bad += refused
        return EncodedBatch(
            read=batch.read,
            text_bytes=sum(len(t.encode()) for d in found for t in d.texts),
            documents=len(found),
            tokens=tokens,
            bad_count=len(bad),
            bad=bad[:SHOWN],
        )

    def _encode(self, found: Sequence[Document]) -> list[Tokens]:
        return [self._encode_texts([d.texts[i] for d in found]) for i in range(len(self.settings.keys))]

    def _encode_one_by_one(self, found: Sequence[Document]) -> tuple[list[Document], list[Tokens], list[str]]:
        """Encode what can be, where the tokenizer does not take every text."""
        taken, refused = [], []
        for document in found:
            try:
                self._encode([document])
                taken.append(document)
            except InputError as error:
                refused.append(f"{document.place}: {error}")
        return taken, self._encode(taken), refused

    def _encode_texts(self, texts: list[str]) -> Tokens:
        """Encode documents. Sequences and documents without a token are left out."""
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


@dataclasses.dataclass
class Output:
    """What was written under one prefix."""

    prefix: str
    documents: int = 0
    sequences: int = 0
    tokens: int = 0


@dataclasses.dataclass
class Report:
    """What `preprocess` did.

    Attributes:
        documents: read and encoded; an output has fewer where some hold no token.
        bad_lines: the first of the `bad_count` lines that were left out, as FILE:LINE: reason.
    """

    outputs: list[Output]
    documents: int = 0
    text_bytes: int = 0
    seconds: float = 0.0
    bad_count: int = 0
    bad_lines: list[str] = dataclasses.field(default_factory=list)


def preprocess(config: PreprocessConfig, tokenizer_config: TokenizerConfig) -> Report:
    """Write the token files that `config` describes. They get their names only when all are complete.

    Raises:
        InputError: a flag or a file is wrong, a line is bad (unless such lines are to be skipped), there is no
            text at all, or the files cannot be written.
    """
    if len(set(config.json_keys)) < len(config.json_keys):
        raise InputError(f"--json-keys: {' '.join(config.json_keys)} names a key twice")
    if config.keep_newlines and not config.split_sentences:
        raise InputError("--keep-newlines: says how --split-sentences splits; give both or neither")
    files = find_files(config.input)
    tokenizer = build_tokenizer(tokenizer_config)
    batches = read_batches(files, config.json_keys)
    if any(kind_of(file)[0] == "txt" for file in files):
        print("plain text (*.txt) is cut into documents at its blank lines", file=sys.stderr, flush=True)
    settings, batches = _prepare(config, tokenizer, tokenizer_config, batches)
    total_bytes = sum(map(os.path.getsize, files))
    workers = min(config.workers or cores(), total_bytes // BATCH_BYTES + 1)

    level = "sentence" if config.split_sentences else "document"
    report = Report([Output(f"{config.output_prefix}_{key}_{level}") for key in config.json_keys])
    _make_folder(config.output_prefix)
    with contextlib.ExitStack() as stack:
        writers = [
            stack.enter_context(IndexedDatasetWriter(output.prefix, best_dtype(tokenizer.vocab_size)))
            for output in report.outputs
        ]
        progress = stack.enter_context(Progress(total_bytes, config.log_interval))
        results = stack.enter_context(
            contextlib.closing(map_in_order(BatchEncoder, settings, batches, workers))
        )
        for result in results:
            if result.bad and config.on_bad_line == "stop":
                raise InputError(f"{result.bad[0]} (--on-bad-line skip leaves such lines out)")
            for output, writer, tokens in zip(report.outputs, writers, result.tokens, strict=True):
                writer.add_documents(*tokens)
                output.documents += len(tokens.sequences_per_document)
                output.sequences += len(tokens.sequence_sizes)
                output.tokens += len(tokens.tokens)
            report.bad_count += result.bad_count
            report.bad_lines += result.bad[: SHOWN - len(report.bad_lines)]
            progress.update(result.documents, result.text_bytes, result.read)
        for output in report.outputs:
            if output.tokens == 0:
                raise InputError(f"--input: {' '.join(config.input)} holds no text for {output.prefix}")
    report.documents, report.text_bytes = progress.documents, progress.text_bytes
    report.seconds = progress.seconds
    return report


def _prepare(
    config: PreprocessConfig,
    tokenizer: Tokenizer,
    tokenizer_config: TokenizerConfig,
    batches: Iterator[Batch],
) -> tuple[EncoderSettings, Iterator[Batch]]:
    """Choose the engine, on documents of the first batch; the batches are returned to be read from the start."""
    first = list(itertools.islice(batches, 1))
    sample, characters = [], 0
    for document in itertools.chain.from_iterable(documents(b, config.json_keys)[0] for b in first):
        if characters < SAMPLE_CHARACTERS:
            sample += document.texts
            characters += sum(map(len, document.texts))
    engine, reason = choose_engine(tokenizer, sample)
    print(f"encoding with {reason}", file=sys.stderr, flush=True)
    settings = EncoderSettings(
        tokenizer=tokenizer_config,
        engine=engine,
        keys=config.json_keys,
        split_sentences=config.split_sentences,
        keep_newlines=config.keep_newlines,
        eod=tokenizer.eod if config.append_eod else None,
    )
    return settings, itertools.chain(first, batches)


def _make_folder(prefix: str) -> None:
    folder = Path(prefix).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--output-prefix: the folder {folder} cannot be made: {error.strerror}") from None
