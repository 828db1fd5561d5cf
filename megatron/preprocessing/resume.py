"""Progress of a preparation that was interrupted, saved beside its files, so that the same command continues it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.errors import InputError
from megatron.files import read_file
from megatron.preprocessing.documents import Position
from megatron.preprocessing.report import Output, Report
from megatron.tokenizer.record import as_json, write_synced


@dataclasses.dataclass(frozen=True)
class Saved:
    """State at a saved point.

    Attributes:
        file_start: beginning of the input that was being read.
        report: counts up to the saved point, which is the end of record number `report.records`.
        lengths: of each output, as `IndexedDatasetWriter` takes them; None if nothing is saved.
    """

    file_start: Position
    report: Report
    lengths: Sequence[Sequence[int] | None]


class ProgressFile:
    """File with the saved state of one preparation: a SHA-256, and JSON.

    As a context manager it says on stderr that an interrupted run can be continued.

    Args:
        prefixes: outputs; the file stands beside the first.
        settings: all that decides the outputs, by flag.
    """

    def __init__(self, prefixes: Sequence[str], settings: Mapping[str, Any]) -> None:
        self.path = Path(f"{prefixes[0]}.progress.part")
        self._prefixes = prefixes
        self._settings = json.loads(json.dumps(settings))  # tuples become lists, as in the file

    def __enter__(self) -> ProgressFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self.path.exists():
            print(f"the same command continues from the progress in {self.path}", file=sys.stderr, flush=True)

    def write(self, saved: Saved) -> None:
        """Replace the state.

        Raises:
            InputError: it cannot be written.
        """
        content = as_json({"format": 1, "settings": self._settings, **dataclasses.asdict(saved)})
        temporary = Path(f"{self.path}.tmp")
        try:
            write_synced(temporary, hashlib.sha256(content).hexdigest().encode() + b"\n" + content)
            os.replace(temporary, self.path)
        except OSError as error:
            raise InputError(f"{self.path} cannot be written: {error.strerror}") from None

    def remove(self) -> None:
        """Remove the state, if there is one."""
        self.path.unlink(missing_ok=True)

    def read(self) -> Saved | None:
        """Read the state that an interrupted run left; None without one.

        Raises:
            InputError: it cannot be read, is damaged, or a setting has changed.
        """
        try:
            digest, _, content = read_file(self.path).partition(b"\n")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise InputError(f"{self.path} cannot be read: {error.strerror}") from None
        again = f"remove {' '.join(f'{prefix}.*.part' for prefix in self._prefixes)} to start again"
        if (
            hashlib.sha256(content).hexdigest().encode() != digest
            or (state := json.loads(content))["format"] != 1
        ):
            raise InputError(f"{self.path} is damaged, or of another version; {again}")
        for flag, value in self._settings.items():
            before = state["settings"].get(flag)
            if value != before:
                raise InputError(
                    f"{flag}: is {value}, but was {before} in the interrupted run; give that to continue it, or {again}"
                )
        report = state["report"]
        outputs = [
            Output(**(output | {"prefix": prefix}))
            for output, prefix in zip(report["outputs"], self._prefixes, strict=True)
        ]
        saved = Saved(
            Position(*state["file_start"]), Report(**(report | {"outputs": outputs})), state["lengths"]
        )
        print(
            f"continuing an interrupted run after {saved.report.documents:,} documents",
            file=sys.stderr,
            flush=True,
        )
        return saved
