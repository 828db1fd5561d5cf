"""Checkpoint formats of other programs that `--load` accepts.

The core reads only its own format; `megatron.plugins` registers the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from megatron.checkpoint.checkpoint import Checkpoint


@dataclasses.dataclass(frozen=True)
class Format:
    """A checkpoint format of another program.

    Attributes:
        name: shown in messages.
        recognizes: True for the path of a checkpoint in this format.
        open: reads everything but the tensors; raises `InputError` if a run cannot load the checkpoint.
        hint: words to add to the message about a path that is not there.
    """

    name: str
    recognizes: Callable[[Path], bool]
    open: Callable[[Path], Checkpoint]
    hint: Callable[[Path], str] = lambda path: ""


# By name, in the order in which they are tried. Filled by `megatron.plugins`.
FORMATS: dict[str, Format] = {}


def why_not(path: Path, missing: str) -> str:
    """Describe a path that holds no checkpoint, for a message; `missing` says what a folder lacks."""
    if path.is_file():
        return "is a file; unpack it if it is an archive, and give the folder"
    if path.is_dir():
        return f"holds no {missing}"
    return "is not a folder" + "".join(format.hint(path) for format in FORMATS.values())
