"""Several pairs of token files to one."""

from __future__ import annotations

import dataclasses
import functools
import os
from pathlib import Path

from megatron.data.indexed import IndexedDataset, IndexedDatasetWriter
from megatron.data.progress import Progress
from megatron.flags import Config, InputError, flag


@dataclasses.dataclass(frozen=True, kw_only=True)
class MergeConfig(Config):
    """What to merge, and where to write it."""

    input: str | None = flag(
        None,
        "folder of .bin and .idx files, which are merged in the order of their names",
        required=True,
        metavar="DIR",
    )
    output_prefix: str | None = flag(
        None, "files are written as PREFIX.bin and PREFIX.idx", required=True, metavar="PREFIX"
    )


def merge(config: MergeConfig) -> list[IndexedDataset]:
    """Write one pair of token files with all documents of a folder's; what was merged, in that order.

    The bytes are those that preprocessing the texts one after the other would give. Tokens are copied without being
    held in memory; the files get their names only when they are complete.

    Raises:
        InputError: there are no files, one of a pair is missing or damaged, they differ in dtype, the output would be
            among them, or it cannot be written.
    """
    prefixes = _prefixes(config.input)
    if Path(config.output_prefix).resolve() in [prefix.resolve() for prefix in prefixes]:
        raise InputError(
            f"--output-prefix: {config.output_prefix} is one of the files in --input {config.input}, which are to be "
            "merged; choose another name or folder"
        )
    datasets = [IndexedDataset(prefix) for prefix in prefixes]
    first = datasets[0]
    for dataset in datasets:
        if dataset.dtype != first.dtype:
            raise InputError(
                f"{dataset.idx_path} holds {dataset.dtype.name} and {first.idx_path} {first.dtype.name}; only files of "
                "one dtype can be merged, those of vocabularies on the same side of 65,500 ids"
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
    """The token files in a folder, without their endings, in the order of their names."""
    try:
        names = {Path(entry.path) for entry in os.scandir(folder) if entry.is_file()}
    except OSError as error:
        raise InputError(f"--input: {folder} is not a folder that can be read: {error.strerror}") from None
    prefixes = sorted({str(name.with_suffix("")) for name in names if name.suffix in (".bin", ".idx")})
    if not prefixes:
        raise InputError(f"--input: {folder} holds no .bin and .idx files")
    return [Path(prefix) for prefix in prefixes]
