"""Entries of the tables of Megatron-LM's flags that this program does not implement."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class NvidiaFlag:
    """A flag of Megatron-LM that this program recognizes and does not implement.

    Attributes:
        usage: the flag, followed by a word for each value; the last word ends in "..." if it takes several.
        refused: True if ignoring the flag could change the trained model, so that the run must not start.
        note: the reason why it has no effect, or what to use instead.
        harmless: values that ask for nothing, accepted silently.
        instead: words of this program's command line that the flag stands for; its own values follow them.
    """

    usage: str
    refused: bool
    note: str
    harmless: tuple[str, ...] = ()
    instead: str = ""

    @property
    def name(self) -> str:
        return self.usage.split()[0]

    @property
    def nargs(self) -> int | str:
        """The number of values that follow, as argparse counts them."""
        return "*" if self.usage.endswith("...") else len(self.usage.split()) - 1


def accept(note: str, *usages: str) -> tuple[NvidiaFlag, ...]:
    """Flags without effect."""
    return tuple(NvidiaFlag(usage, False, note) for usage in usages)


def refuse(note: str, *usages: str, harmless: Sequence[str] = ()) -> tuple[NvidiaFlag, ...]:
    """Flags that end the command, except with a `harmless` value."""
    return tuple(NvidiaFlag(usage, True, note, tuple(harmless)) for usage in usages)


def rename(instead: str, *usages: str) -> tuple[NvidiaFlag, ...]:
    """Other names of what `instead` says."""
    return tuple(NvidiaFlag(usage, False, instead, instead=instead) for usage in usages)
