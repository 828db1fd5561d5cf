"""Output files and signals of the subcommands."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
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
    """Write an output file, whole or not at all; raises `InputError` if it cannot be written."""
    with replacing(flag, path) as target:
        target.write_text(text, encoding="utf-8")


@contextmanager
def replacing(flag: str, path: Path) -> Iterator[Path]:
    """Yield the place at which to write an output file, which is moved to `path` once it is written.

    A file that is there stays as it was if the new one cannot be written. Devices and pipes are written in place.

    Raises:
        InputError: the file cannot be written, for an `OSError` of the code within.
    """
    # A name in /dev, such as /dev/stdout, stands for a file that is open already.
    in_place = path.exists() and (not path.is_file() or path.absolute().is_relative_to("/dev"))
    final = path if in_place else path.resolve()  # a link stays one
    target = path if in_place else final.with_name(f".writing-{final.name}")
    try:
        yield target
        if not in_place:
            target.replace(final)
    except OSError as error:
        raise InputError(f"{flag}: {path} cannot be written ({error.strerror})") from None
    finally:
        if not in_place:
            target.unlink(missing_ok=True)


def exit_on_sigterm() -> None:
    """Exit on SIGTERM as on Ctrl-C, so that the command cleans up; ignore further signals meanwhile."""

    def leave(number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)
