"""Output files and signals of the subcommands."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import FrameType

from megatron.errors import InputError


def check_output_file(flag: str, path: Path | None) -> None:
    """Raise `InputError` if an output file cannot be written, before there is anything to write."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        fault = "it is a directory" if path.is_dir() else f"there is no directory {path.absolute().parent}"
        raise InputError(f"{flag}: {path} cannot be written: {fault}")


def check_not_root(flag: str, path: str | Path) -> None:
    """Raise `InputError` if a folder or the beginning of a file's name is the root of the file system.

    A command run as root would leave its files there, mostly for a variable that is empty.
    """
    if Path(path).absolute() == Path(Path(path).absolute().anchor):
        raise InputError(f"{flag}: {path} is the root of the file system; name a place below it")


def write_output_file(flag: str, path: Path, text: str) -> None:
    """Write an output file; raises `InputError` if it cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        if path.is_file():  # a part of it
            path.unlink()
        raise InputError(f"{flag}: {path} cannot be written ({error.strerror})") from None


def exit_on_sigterm() -> None:
    """Exit on SIGTERM as on Ctrl-C, so that the command cleans up; ignore further signals meanwhile."""

    def leave(number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)
