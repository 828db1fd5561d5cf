"""Merge several pairs of token files into one."""

from __future__ import annotations

import dataclasses
import functools
import os
from pathlib import Path

from megatron.data.indexed import IndexedDataset
from megatron.data.indexed_writer import IndexedDatasetWriter
from megatron.errors import InputError
from megatron.flags import Config, flag
from megatron.preprocessing.progress import Progress


@dataclasses.dataclass(frozen=True, kw_only=True)
class MergeConfig(Config):
    """Input and output of a merge."""

    input: str = flag(
        None,
        "directory of .bin and .idx files, merged in the order of their names",
        required=True,
        metavar="DIR",
    )
    output_prefix: str = flag(None, "write PREFIX.bin and PREFIX.idx", required=True, metavar="PREFIX")


def merge(config: MergeConfig) -> list[IndexedDataset]:
    """Merge all token files of a directory into one pair; return the merged files in order.

    The result equals preprocessing the concatenated texts. Tokens are copied in pieces, so memory stays small. The
    output gets its final names only when complete.

    Raises:
        InputError: there are no files, one of a pair is missing or damaged, the dtypes differ, the output is one of the
            inputs, or it cannot be written.
    """
    prefixes = _prefixes(config.input)
    if Path(config.output_prefix).resolve() in [prefix.resolve() for prefix in prefixes]:
        raise InputError(
            f"--output-prefix: {config.output_prefix} is one of the files to merge in --input {config.input}; "
            "choose another name or directory"
        )
    datasets = [IndexedDataset(prefix) for prefix in prefixes]
    first = datasets[0]
    for dataset in datasets:
        if dataset.dtype != first.dtype:
            raise InputError(
                f"{dataset.idx_path} has dtype {dataset.dtype.name}, but {first.idx_path} has {first.dtype.name}; only "
                "files of one dtype can be merged (uint16 below 65,500 ids, int32 otherwise)"
            )
    total = sum(os.path.getsize(dataset.bin_path) for dataset in datasets)
    with (
        IndexedDatasetWriter(config.output_prefix, first.dtype) as writer,
        Progress(total, log_interval=1) as progress,
    ):
        for dataset in datasets:
            writer.add_dataset(dataset, functools.partial(_advance, progress))
            progress.update(len(dataset.doc_idx) - 1, 0, progress.text_bytes)
    return datasets


def _advance(progress: Progress, copied: int) -> None:
    progress.update(0, copied, progress.text_bytes + copied)


def _prefixes(folder: str) -> list[Path]:
    """Return the prefixes of the token files in a directory, sorted by name."""
    try:
        names = {Path(entry.path) for entry in os.scandir(folder) if entry.is_file()}
    except OSError as error:
        raise InputError(f"--input: {folder} is not a readable directory: {error.strerror}") from None
    prefixes = sorted({str(name.with_suffix("")) for name in names if name.suffix in (".bin", ".idx")})
    if not prefixes:
        raise InputError(f"--input: {folder} has no .bin and .idx files")
    return [Path(prefix) for prefix in prefixes]
