"""Convert text files to token files.

This process reads the input in batches of whole documents and writes the results. Worker processes parse each batch,
split it into sentences if required, and encode it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron.cores import available_cores
from megatron.data.indexed_writer import IndexedDatasetWriter, best_dtype
from megatron.errors import InputError
from megatron.flags import Config, flag
from megatron.preprocessing.batch_encoder import BatchEncoder, EncoderSettings
from megatron.preprocessing.blocks import BATCH_BYTES
from megatron.preprocessing.documents import (
    START,
    TXT_DOCUMENTS,
    DocumentBatch,
    documents,
    kind_of,
    read_batches,
)
from megatron.preprocessing.encoder import choose_engine
from megatron.preprocessing.inputs import Input, find_inputs, is_dataset, total_size
from megatron.preprocessing.progress import Progress
from megatron.preprocessing.report import Output, Report
from megatron.preprocessing.resume import ProgressFile, Saved
from megatron.preprocessing.shards import SUFFIX, TEMPORARY, Shard, ShardRecord, fingerprint, parse_shard
from megatron.preprocessing.workers import map_in_order
from megatron.tokenizer import Tokenizer, build_tokenizer
from megatron.tokenizer.config import TokenizerConfig
from megatron.tokenizer.record import (
    TokenizerRecord,
    describe_tokenizer,
    discard_tokenizer,
    write_tokenizer,
)

SAMPLE_CHARACTERS = 300_000  # text on which encoders are compared
SAVE_INTERVAL = 30.0  # seconds between two savings of the progress
TXT_NOTES = {
    "file": "each file is one document (--txt-documents blank-lines: blank lines separate documents)",
    "blank-lines": "blank lines separate documents",
}
# Flags that decide which tokens a text gives, beside the tokenizer. Those of all shards must agree, and those of an
# interrupted run and the run that continues it.
TEXT_SETTINGS = ("split_sentences", "keep_newlines", "lang", "append_eod", "txt_documents")


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


def preprocess(config: PreprocessConfig, tokenizer_config: TokenizerConfig) -> Report:
    """Write the token files that `config` describes. They get their final names only when all are complete.

    If a run was interrupted, this one continues from the progress that it saved; the files are those of one run.

    Raises:
        InputError: a flag or a file is wrong, a line is bad (unless bad lines are skipped), there is no text, the
            files cannot be written, or the interrupted run had other settings.
    """
    if len(set(config.json_keys)) < len(config.json_keys):
        raise InputError(f"--json-keys: {' '.join(config.json_keys)} has a duplicate key")
    if config.keep_newlines and not config.split_sentences:
        raise InputError("--keep-newlines: requires --split-sentences")
    inputs = find_inputs(config.input)
    shard = parse_shard(config.shard) if config.shard else None
    own = shard.inputs(inputs) if shard else inputs
    tokenizer = build_tokenizer(tokenizer_config)
    record = describe_tokenizer(tokenizer, tokenizer_config)
    level = "sentence" if config.split_sentences else "document"
    end = shard.suffix if shard else ""
    prefixes = [f"{config.output_prefix}_{key}_{level}{end}" for key in config.json_keys]
    progress_file = ProgressFile(prefixes, _settings(config, inputs, record))
    saved = progress_file.read() or Saved(
        START, Report([Output(p) for p in prefixes]), [None] * len(prefixes)
    )
    report = saved.report
    if any(not is_dataset(source.address) and kind_of(source.address)[0] == "txt" for source in own):
        print(f"plain text (*.txt): {TXT_NOTES[config.txt_documents]}", file=sys.stderr, flush=True)
    batches = read_batches(
        [source.address for source in own], config.json_keys, config.txt_documents, saved.file_start
    )
    settings, batches = _prepare(config, tokenizer, tokenizer_config, _after(batches, report.records))
    settings = dataclasses.replace(
        settings, share=shard.share(inputs) if shard else (0, 1), done=report.records
    )
    _make_folder(config.output_prefix)

    def prepare(output: Output) -> Callable[[], None]:
        done = _shard_record(shard, inputs, config, record, report, output) if shard else None
        return _write_beside(output.prefix, tokenizer, record, done, progress_file)

    dtype = best_dtype(tokenizer.vocab_size)
    with contextlib.ExitStack() as stack:
        writers = [
            stack.enter_context(
                IndexedDatasetWriter(output.prefix, dtype, functools.partial(prepare, output), lengths)
            )
            for output, lengths in zip(report.outputs, saved.lengths, strict=True)
        ]
        stack.push(functools.partial(_discard, prefixes))
        _write(config, total_size(own), settings, batches, writers, report, progress_file)
        for output in report.outputs:
            # A shard of little text may be empty.
            if output.tokens == 0 and not shard:
                raise InputError(f"--input: {' '.join(config.input)} has no text for {output.prefix}")
        for writer in writers:  # a full disk shows here, before the first file is replaced
            writer.finish()
    return report


def _write_beside(
    prefix: str,
    tokenizer: Tokenizer,
    tokenizer_record: TokenizerRecord,
    shard_record: ShardRecord | None,
    progress_file: ProgressFile,
) -> Callable[[], None]:
    """Write what stands beside an output's .idx file under temporary names; returns a function that renames it."""
    renames = [write_tokenizer(prefix, tokenizer_record, {file.name: file for file in tokenizer.files})]
    if shard_record is not None:
        renames.append(shard_record.write(prefix))

    def publish() -> None:
        Path(prefix + SUFFIX).unlink(missing_ok=True)
        for rename in renames:
            rename()
        progress_file.remove()  # its .part files are renamed next

    return publish


def _discard(prefixes: Sequence[str], kind: type[BaseException] | None, *_: object) -> None:
    """Leave the context of the writers: if it raised, remove what was written to stand beside the .idx files."""
    for prefix in prefixes if kind is not None else ():
        discard_tokenizer(prefix)
        Path(prefix + TEMPORARY).unlink(missing_ok=True)


def _settings(
    config: PreprocessConfig, inputs: Sequence[Input], tokenizer: TokenizerRecord
) -> dict[str, Any]:
    """All that decides the token files, by flag."""
    names = ("json_keys", *TEXT_SETTINGS)
    return {
        "--input": f"{len(inputs):,} inputs (names and sizes: {fingerprint(inputs)[:16]})",
        "--tokenizer": f"{tokenizer} {tokenizer.digest[:16]}",
    } | {f"--{name.replace('_', '-')}": getattr(config, name) for name in names}


def _after(batches: Iterator[DocumentBatch], records: int) -> Iterator[DocumentBatch]:
    """Leave out the batches that end before a number of records, counted over all files."""
    return itertools.dropwhile(lambda batch: batch.before + batch.records <= records, batches)


def _write(
    config: PreprocessConfig,
    total_bytes: int | None,
    settings: EncoderSettings,
    batches: Iterator[DocumentBatch],
    writers: Sequence[IndexedDatasetWriter],
    report: Report,
    progress_file: ProgressFile,
) -> None:
    """Encode the batches, write and count their documents, and save the progress."""
    workers = config.workers or available_cores()
    if total_bytes is not None:
        workers = min(workers, total_bytes // BATCH_BYTES + 1)
    seconds_before, next_save = report.seconds, SAVE_INTERVAL
    _check_lines(config, report)  # an interrupted run may have skipped some
    with (
        progress_file,
        Progress(total_bytes, config.log_interval, report.read) as progress,
        contextlib.closing(map_in_order(BatchEncoder, settings, batches, workers)) as results,
    ):
        for result in results:
            report.add(result)
            _check_lines(config, report)
            for writer, tokens in zip(writers, result.tokens, strict=True):
                writer.add_documents(*tokens)
            progress.update(result.documents, result.text_bytes, result.read)
            report.seconds = seconds_before + progress.seconds
            if progress.seconds >= next_save:
                lengths = [writer.save() for writer in writers]
                progress_file.write(Saved(result.file_start, report, lengths))
                next_save = progress.seconds + SAVE_INTERVAL
        report.seconds = seconds_before + progress.seconds


def _check_lines(config: PreprocessConfig, report: Report) -> None:
    if report.bad_lines and config.on_bad_line == "stop":
        raise InputError(f"{report.bad_lines[0]} (--on-bad-line skip skips such lines)")


def _shard_record(
    shard: Shard,
    inputs: Sequence[Input],
    config: PreprocessConfig,
    tokenizer: TokenizerRecord,
    report: Report,
    output: Output,
) -> ShardRecord:
    settings = {name: getattr(config, name) for name in (*TEXT_SETTINGS, "on_bad_line")}
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
