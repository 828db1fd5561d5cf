"""Merge several pairs of token files into one: any, or the shards of one preparation, which are checked."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from pathlib import Path

from megatron.data.indexed import IndexedDataset
from megatron.data.indexed_writer import IndexedDatasetWriter
from megatron.errors import InputError
from megatron.flags import Config, flag
from megatron.preprocessing.progress import Progress
from megatron.preprocessing.shards import SUFFIX, check_complete, read_record, stem_of
from megatron.tokenizer.record import (
    FOLDER,
    TokenizerRecord,
    discard_tokenizer,
    read_tokenizer,
    remove_tokenizer,
    write_tokenizer,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MergeConfig(Config):
    """Input and output of a merge."""

    input: str = flag(
        None,
        "directory of .bin and .idx files, merged in the order of their names; or the prefix of the shards of "
        "`megatron preprocess --shard`",
        required=True,
        metavar="DIR",
    )
    output_prefix: str = flag(None, "write PREFIX.bin and PREFIX.idx", required=True, metavar="PREFIX")


@dataclasses.dataclass(frozen=True)
class Merged:
    """Result of a merge.

    Attributes:
        datasets: the merged files in order.
        shards: number of shards of one preparation that they are; None if they are other files.
        bad: lines that the preparation skipped.
    """

    datasets: list[IndexedDataset]
    shards: int | None
    bad: int


def merge(config: MergeConfig) -> Merged:
    """Merge all token files of a directory into one pair.

    The result equals preprocessing the concatenated texts. Tokens are copied in pieces, so memory stays small. The
    output gets its final names only when complete. If the files are shards of one preparation (`megatron preprocess
    --shard`), all of them must be there.

    Raises:
        InputError: there are no files, one of a pair is missing or damaged, shards are missing or do not belong
            together, the dtypes or tokenizers differ, the output is one of the inputs, or it cannot be written.
    """
    prefixes = _prefixes(config.input)
    if Path(config.output_prefix).resolve() in [prefix.resolve() for prefix in prefixes]:
        raise InputError(
            f"--output-prefix: {config.output_prefix} is one of the files to merge in --input {config.input}; "
            "choose another name or directory"
        )
    datasets = [IndexedDataset(prefix) for prefix in prefixes]
    records = [read_record(dataset.prefix) for dataset in datasets]
    if any(records):
        check_complete(datasets, records)
    first = datasets[0]
    for dataset in datasets:
        if dataset.dtype != first.dtype:
            raise InputError(
                f"{dataset.idx_path} has dtype {dataset.dtype.name}, but {first.idx_path} has {first.dtype.name}; only "
                "files of one dtype can be merged (uint16 below 65,500 ids, int32 otherwise)"
            )
    tokenizer = _common_tokenizer(datasets)
    total = sum(os.path.getsize(dataset.bin_path) for dataset in datasets)
    with (
        IndexedDatasetWriter(
            config.output_prefix,
            first.dtype,
            functools.partial(_prepare, config.output_prefix, first.prefix, tokenizer),
        ) as writer,
        Progress(total, log_interval=1) as progress,
    ):
        try:
            for dataset in datasets:
                writer.add_dataset(dataset, functools.partial(_advance, progress))
                progress.update(len(dataset.doc_idx) - 1, 0, progress.text_bytes)
            writer.finish()
        except BaseException:
            discard_tokenizer(config.output_prefix)
            raise
    return Merged(datasets, len(datasets) if any(records) else None, sum(r.bad for r in records if r))


def _common_tokenizer(datasets: list[IndexedDataset]) -> TokenizerRecord | None:
    """Return the recorded tokenizer of all files; None if some have no record."""
    found = {dataset.prefix: read_tokenizer(dataset.prefix) for dataset in datasets}
    known = [(prefix, record) for prefix, record in found.items() if record]
    for prefix, record in known:
        if record.key != known[0][1].key:
            raise InputError(
                f"{prefix} was made with {record}, but {known[0][0]} with {known[0][1]}; only files of one tokenizer "
                "can be merged"
            )
    return known[0][1] if len(known) == len(datasets) else None


def _prepare(output: str, source: str, tokenizer: TokenizerRecord | None) -> Callable[[], None]:
    """Copy the tokenizer's record from a merged file to the output; returns a function that renames it.

    Without a record the function removes an older one.
    """
    rename: Callable[[], None] = functools.partial(remove_tokenizer, output)
    if tokenizer is not None:
        rename = write_tokenizer(output, tokenizer, {n: Path(source + FOLDER, n) for n in tokenizer.files})

    def publish() -> None:
        Path(output + SUFFIX).unlink(missing_ok=True)
        rename()

    return publish


def _advance(progress: Progress, copied: int) -> None:
    progress.update(0, copied, progress.text_bytes + copied)


def _prefixes(source: str) -> list[Path]:
    """Return the prefixes of the token files in a directory, or of the shards of a prefix, sorted by name."""
    folder, stem = (source, None) if os.path.isdir(source) else os.path.split(source)
    try:
        names = {Path(entry.path) for entry in os.scandir(folder or ".") if entry.is_file()}
    except OSError as error:
        raise InputError(f"--input: {source} is not a readable directory: {error.strerror}") from None
    found = {name.with_suffix("") for name in names if name.suffix in (".bin", ".idx")}
    if stem is not None:
        found = {name for name in found if stem_of(name.name) == stem != name.name}
    if not found:
        what = (
            "has no .bin and .idx files"
            if stem is None
            else "is neither a directory nor the prefix of shards"
        )
        raise InputError(f"--input: {source} {what}")
    return [Path(prefix) for prefix in sorted(map(str, found))]
