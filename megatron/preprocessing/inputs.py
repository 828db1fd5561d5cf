"""Find and open the inputs of preprocessing: files, folders, addresses of fsspec, and Hugging Face datasets.

Inputs keep the order of the command line; matches of a pattern and files of a folder are sorted by name.
"""

from __future__ import annotations

import dataclasses
import glob
import os
import re
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, BinaryIO, cast

from megatron.errors import InputError

COMPRESSIONS = (".gz", ".zst")
# Files that are read of a folder. A file that is named may have any other suffix.
TEXT_SUFFIXES = (".txt", ".jsonl", ".ndjson", ".json", ".parquet")
DATASET = "hf:"
_REMOTE = re.compile(r"[a-z][a-z0-9+.-]*(://|::)", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Input:
    """A file or a dataset.

    Attributes:
        address: path, address of fsspec, or hf:NAME.
        size: bytes on disk; None if unknown, as of a pipe.
    """

    address: str
    size: int | None


def find_inputs(patterns: Sequence[str]) -> list[Input]:
    """Expand --input.

    Raises:
        InputError: an input does not exist, cannot be listed, or a pattern or folder has no file.
    """
    found: list[Input] = []
    for pattern in patterns:
        if is_dataset(pattern):
            found.append(Input(pattern, None))
        elif is_remote(pattern):
            found += _find_remote(pattern)
        else:
            found += [Input(path, _local_size(path)) for path in _find_local(pattern)]
    return found


def total_size(inputs: Sequence[Input]) -> int | None:
    """The bytes of all inputs on disk; None if those of one are not known."""
    sizes = [source.size for source in inputs]
    return None if None in sizes else sum(filter(None, sizes))


def is_dataset(address: str) -> bool:
    """True for hf:NAME. (hf://... is an address of fsspec.)"""
    return address.startswith(DATASET) and not is_remote(address)


def is_remote(address: str) -> bool:
    """True for an address of fsspec: PROTOCOL://..., or a chain of them."""
    return bool(_REMOTE.match(address)) and not os.path.exists(address)


def open_input(address: str) -> BinaryIO:
    """Open a file for reading.

    Raises:
        InputError: a remote file cannot be opened.
        OSError: a local file cannot be opened.
    """
    if not is_remote(address):
        return open(address, "rb")
    try:
        return cast(BinaryIO, _fsspec(address).open(address, "rb").open())
    except InputError:
        raise
    except Exception as error:  # each protocol's library has its own exceptions
        raise InputError(f"{address}: cannot be read: {reason(error)}") from None


def reason(error: BaseException) -> str:
    """The message of a library's exception, on one line."""
    return " ".join(str(error).split()) or type(error).__name__


def _local_size(path: str) -> int | None:
    try:
        found = os.stat(path)
    except OSError as error:  # a link to nothing
        raise InputError(f"--input: {path} cannot be read: {error.strerror}") from None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _find_local(pattern: str) -> list[str]:
    if os.path.isdir(pattern):
        return _files_of(pattern, [str(path) for path in _walk(pattern)])
    matches = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
    found = [path for path in matches if not os.path.isdir(path)]
    if not found and not glob.has_magic(pattern):
        raise InputError(f"--input: {pattern} does not exist")
    _check_matches(pattern, matches, found)
    return found


def _check_matches(pattern: str, matches: Sequence[str], files: Sequence[str]) -> None:
    """Check that a pattern matches files, and print the number of folders that it matches but whose files it does not.

    Raises:
        InputError: it matches no files.
    """
    if not files:
        raise InputError(f"--input: {pattern} matches no file{', only folders' if matches else ''}")
    read = {parent for file in files for parent in PurePath(file).parents}
    folders = [path for path in sorted({*matches} - {*files}) if PurePath(path) not in read]
    if folders:
        print(
            f"note: --input: {pattern}: matching folders are not read: {folders[0]} ({len(folders):,} in all); "
            "name a folder itself to read its files",
            file=sys.stderr,
        )


def _walk(folder: str) -> list[Path]:
    """All files below a folder, sorted by their paths, without hidden ones. A folder with several links counts once."""
    found, seen = [], {os.path.realpath(folder)}
    for parent, folders, names in os.walk(folder, onerror=_refuse, followlinks=True):
        inner = [name for name in sorted(folders) if not name.startswith(".")]
        folders.clear()
        for name in inner:
            real = os.path.realpath(os.path.join(parent, name))
            if real not in seen:
                seen.add(real)
                folders.append(name)
        found += [Path(parent, name) for name in names if not name.startswith(".")]
    if not found:
        raise InputError(f"--input: {folder} is a folder without files")
    names_of_dataset = {path.name for path in found if path.parent == Path(folder)}
    if "dataset_dict.json" in names_of_dataset or {"dataset_info.json", "state.json"} <= names_of_dataset:
        raise InputError(f"--input: {folder} is a Hugging Face dataset; write {DATASET}{folder}")
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def _refuse(error: OSError) -> None:
    raise InputError(f"--input: {error.filename} cannot be read: {error.strerror}") from None


def _files_of(folder: str, files: Sequence[str]) -> list[str]:
    """The files of a folder that hold text by their names; the number of the others is printed."""
    texts = [file for file in files if _is_text(file)]
    if not texts:
        listed = " ".join(TEXT_SUFFIXES)
        raise InputError(
            f"--input: {folder} has no file with one of the suffixes {listed} (or these with .gz, .zst); "
            "name the files, as in 'DIR/*.log'"
        )
    others = [file for file in files if not _is_text(file)]
    if others:
        print(
            f"note: --input: {folder}: {len(texts):,} files to read; {len(others):,} others have no known suffix, "
            f"such as {os.path.basename(others[0])}",
            file=sys.stderr,
        )
    return texts


def _is_text(file: str) -> bool:
    stem, suffix = os.path.splitext(file)
    return os.path.splitext(stem if suffix in COMPRESSIONS else file)[1] in TEXT_SUFFIXES


def _fsspec(address: str) -> Any:
    try:
        import fsspec
    except ImportError:
        raise InputError(f"{address}: reading it needs fsspec: pip install fsspec") from None
    return fsspec


def _find_remote(pattern: str) -> list[Input]:
    fsspec = _fsspec(pattern)
    try:
        files, path = fsspec.core.url_to_fs(pattern)
        if glob.has_magic(path):
            matches = files.glob(path, detail=True)
            found = {name: info for name, info in matches.items() if _is_file(info)}
            _check_matches(pattern, list(matches), list(found))
        elif _is_file(info := files.info(path)):
            found = {path: info}
        else:
            all_files = files.find(path, detail=True)
            found = {name: all_files[name] for name in _files_of(pattern, sorted(all_files))}
    except InputError:
        raise
    except FileNotFoundError:
        raise InputError(f"--input: {pattern} does not exist") from None
    except Exception as error:  # each protocol's library has its own exceptions
        raise InputError(f"--input: {pattern} cannot be listed: {reason(error)}") from None
    return [Input(_address(pattern, name), found[name].get("size")) for name in sorted(found)]


def _is_file(info: Mapping[str, Any]) -> bool:
    return info.get("type") != "directory"


def _address(pattern: str, name: str) -> str:
    """The address of the file that a file system calls `name`, found by a pattern such as zip://*::s3://B/K."""
    links = pattern.split("::")
    at = next(i for i, link in enumerate(links) if "://" in link)
    protocol = links[at].partition("://")[0]
    links[at] = name if "://" in name else f"{protocol}://{name}"
    return "::".join(links)
