"""Convert text files to token files.

This process reads the input in batches of whole documents and writes the results. Worker processes parse each batch,
split it into sentences if required, and encode it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron.data.indexed_writer import IndexedDatasetWriter, best_dtype
from megatron.errors import InputError
from megatron.flags import Config, flag
from megatron.preprocessing.blocks import BATCH_BYTES
from megatron.preprocessing.documents import (
    TXT_DOCUMENTS,
    Document,
    DocumentBatch,
    documents,
    kind_of,
    read_batches,
)
from megatron.preprocessing.encoder import choose_engine, encoder
from megatron.preprocessing.inputs import Input, find_inputs, is_dataset, total_size
from megatron.preprocessing.progress import Progress
from megatron.preprocessing.sentences import split_sentences
from megatron.preprocessing.shards import SUFFIX, Shard, ShardRecord, fingerprint, parse_shard
from megatron.preprocessing.workers import available_cores, map_in_order
from megatron.tokenizer import Tokenizer, build_tokenizer
from megatron.tokenizer.config import TokenizerConfig
from megatron.tokenizer.record import TokenizerRecord, describe_tokenizer, write_tokenizer

SAMPLE_CHARACTERS = 300_000  # text on which encoders are compared
MAX_LISTED = 10  # bad lines listed in the report
TXT_NOTES = {
    "file": "each file is one document (--txt-documents blank-lines: blank lines separate documents)",
    "blank-lines": "blank lines separate documents",
}
# Flags that all shards of a preparation must have alike, beside inputs and tokenizer.
SHARD_SETTINGS = ("split_sentences", "keep_newlines", "lang", "append_eod", "txt_documents", "on_bad_line")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreprocessConfig(Config):
    """Input, segmentation and output of preprocessing."""

    input: tuple[str, ...] = flag(
        None,
        "files, folders, glob patterns or addresses (s3://... and all others of fsspec): JSON lines, *.txt or "
        "*.parquet, the first two also as *.gz or *.zst; or Hugging Face datasets: hf:NAME[:CONFIG][:SPLIT]",
        nargs="+",
        required=True,
        metavar="INPUT",
    )
    txt_documents: str = flag(
        "file", "what a document of *.txt is: a file, or the text between blank lines", choices=TXT_DOCUMENTS
    )
    shard: str | None = flag(
        None,
        "prepare part I of N, from 1/N to N/N, for many machines; `megatron merge` joins the parts",
        metavar="I/N",
    )
    json_keys: tuple[str, ...] = flag(
        ("text",),
        "keys (or columns) of the texts; each key gets its own files (default: text)",
        nargs="+",
        aliases=("--json-key",),
        metavar="KEY",
    )
    on_bad_line: str = flag(
        "stop",
        "on a line without such a text, stop, or skip and list it",
        choices=("stop", "skip"),
    )
    split_sentences: bool = flag(
        False, "make each sentence a sequence, as BERT needs, instead of each document"
    )
    keep_newlines: bool = flag(False, "keep the whitespace between sentences when splitting")
    lang: str = flag("english", "language of the sentence-splitting rules", choices=("english",))
    append_eod: bool = flag(False, "end each document with the end-of-document token, as GPT needs")
    output_prefix: str = flag(
        None,
        "write PREFIX_KEY_document.bin and .idx (or _sentence)",
        metavar="PREFIX",
        required=True,
    )
    dataset_impl: str = flag("mmap", "format of the files", choices=("mmap",))
    workers: int | None = flag(None, "processes that encode (default: one per core)", low=1)
    log_interval: int = flag(10_000, "documents between progress lines, if stderr is not a terminal", low=1)


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


class Tokens(NamedTuple):
    """Encoded documents, as arguments of `IndexedDatasetWriter.add_documents`."""

    tokens: np.ndarray
    sequence_sizes: np.ndarray
    sequences_per_document: np.ndarray


class EncodedBatch(NamedTuple):
    """Result of a batch: `tokens` for each key; `bad` has the first of `bad_count` messages."""

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
        found, bad = documents(batch, self.settings.keys, self.settings.share)
        try:
            tokens = self._encode(found)
        except InputError:
            found, tokens, refused = self._encode_one_by_one(found)
            bad += refused
        return EncodedBatch(
            read=batch.read,
            records=batch.records,
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


@dataclasses.dataclass
class Output:
    """Counts of what was written under one prefix."""

    prefix: str
    documents: int = 0
    sequences: int = 0
    tokens: int = 0


@dataclasses.dataclass
class Report:
    """Summary of `preprocess`.

    Attributes:
        documents: documents encoded; an output has fewer if some have no tokens.
        bad_lines: first of the `bad_count` skipped lines, as FILE:LINE: reason.
        records: records in the inputs, also those of other shards.
    """

    outputs: list[Output]
    records: int = 0
    documents: int = 0
    text_bytes: int = 0
    seconds: float = 0.0
    bad_count: int = 0
    bad_lines: list[str] = dataclasses.field(default_factory=list)

    def add(self, batch: EncodedBatch) -> None:
        """Count a batch."""
        for output, tokens in zip(self.outputs, batch.tokens, strict=True):
            output.documents += len(tokens.sequences_per_document)
            output.sequences += len(tokens.sequence_sizes)
            output.tokens += len(tokens.tokens)
        self.records += batch.records
        self.documents += batch.documents
        self.text_bytes += batch.text_bytes
        self.bad_count += batch.bad_count
        self.bad_lines += batch.bad[: MAX_LISTED - len(self.bad_lines)]


def preprocess(config: PreprocessConfig, tokenizer_config: TokenizerConfig) -> Report:
    """Write the token files that `config` describes. They get their final names only when all are complete.

    Raises:
        InputError: a flag or a file is wrong, a line is bad (unless bad lines are skipped), there is no text, or the
            files cannot be written.
    """
    if len(set(config.json_keys)) < len(config.json_keys):
        raise InputError(f"--json-keys: {' '.join(config.json_keys)} has a duplicate key")
    if config.keep_newlines and not config.split_sentences:
        raise InputError("--keep-newlines: requires --split-sentences")
    inputs = find_inputs(config.input)
    shard = parse_shard(config.shard) if config.shard else None
    own = shard.inputs(inputs) if shard else inputs
    tokenizer = build_tokenizer(tokenizer_config)
    batches = read_batches([source.address for source in own], config.json_keys, config.txt_documents)
    if any(not is_dataset(source.address) and kind_of(source.address)[0] == "txt" for source in own):
        print(f"plain text (*.txt): {TXT_NOTES[config.txt_documents]}", file=sys.stderr, flush=True)
    settings, batches = _prepare(config, tokenizer, tokenizer_config, batches)
    if shard:
        settings = dataclasses.replace(settings, share=shard.share(inputs))
    total_bytes = total_size(own)
    workers = config.workers or available_cores()
    if total_bytes is not None:
        workers = min(workers, total_bytes // BATCH_BYTES + 1)

    level = "sentence" if config.split_sentences else "document"
    end = shard.suffix if shard else ""
    report = Report([Output(f"{config.output_prefix}_{key}_{level}{end}") for key in config.json_keys])
    _make_folder(config.output_prefix)
    record = describe_tokenizer(tokenizer, tokenizer_config)

    def publish(output: Output) -> None:
        """Write what stands beside an output's .idx file."""
        write_tokenizer(output.prefix, record, {file.name: file for file in tokenizer.files})
        Path(output.prefix + SUFFIX).unlink(missing_ok=True)
        if shard:
            _shard_record(shard, inputs, config, record, report, output).write(output.prefix)

    with contextlib.ExitStack() as stack:
        dtype = best_dtype(tokenizer.vocab_size)
        writers = [
            stack.enter_context(
                IndexedDatasetWriter(output.prefix, dtype, functools.partial(publish, output))
            )
            for output in report.outputs
        ]
        progress = stack.enter_context(Progress(total_bytes, config.log_interval))
        results = stack.enter_context(
            contextlib.closing(map_in_order(BatchEncoder, settings, batches, workers))
        )
        for result in results:
            if result.bad and config.on_bad_line == "stop":
                raise InputError(f"{result.bad[0]} (--on-bad-line skip skips such lines)")
            for writer, tokens in zip(writers, result.tokens, strict=True):
                writer.add_documents(*tokens)
            report.add(result)
            progress.update(result.documents, result.text_bytes, result.read)
        for output in report.outputs:
            # A shard of little text may be empty.
            if output.tokens == 0 and not shard:
                raise InputError(f"--input: {' '.join(config.input)} has no text for {output.prefix}")
    report.seconds = progress.seconds
    return report


def _shard_record(
    shard: Shard,
    inputs: Sequence[Input],
    config: PreprocessConfig,
    tokenizer: TokenizerRecord,
    report: Report,
    output: Output,
) -> ShardRecord:
    settings = {name: getattr(config, name) for name in SHARD_SETTINGS}
    return ShardRecord(
        number=shard.number,
        count=shard.count,
        inputs=len(inputs),
        digest=fingerprint(inputs),
        own_inputs=len(shard.inputs(inputs)),
        by_inputs=shard.by_inputs(inputs),
        records=report.records,
        settings=settings | {"tokenizer": f"{tokenizer} {tokenizer.digest}"},
        documents=output.documents,
        sequences=output.sequences,
        tokens=output.tokens,
        bad=report.bad_count,
    )


def _prepare(
    config: PreprocessConfig,
    tokenizer: Tokenizer,
    tokenizer_config: TokenizerConfig,
    batches: Iterator[DocumentBatch],
) -> tuple[EncoderSettings, Iterator[DocumentBatch]]:
    """Choose the encoder on the beginning of the first batch; return the settings and all batches."""
    first = list(itertools.islice(batches, 1))
    sample: list[str] = []
    left = SAMPLE_CHARACTERS
    for document in itertools.chain.from_iterable(documents(b, config.json_keys)[0] for b in first):
        for text in document.texts if left > 0 else ():
            sample.append(text[:left])
            left -= len(sample[-1])
    engine, reason = choose_engine(tokenizer, sample)
    print(f"encoder: {reason}", file=sys.stderr, flush=True)
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
        raise InputError(
            f"--output-prefix: the directory {folder} cannot be created: {error.strerror}"
        ) from None
