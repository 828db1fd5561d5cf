"""Write docs/flags.md and the table of docs/coming-from-megatron.md, the references of the command line.

python tools/document_flags.py [--check]
"""

from __future__ import annotations

import dataclasses
import sys
import typing
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron.arguments import Parser, run_command, summary
from megatron.flags import Config, Flag, InputError, field_types, flag_name
from megatron.nvidia_flags import DEPARTURES, NVIDIA_FLAGS, OURS_ALONE, NvidiaFlag
from megatron.training.config import RunConfig
from megatron.training.finetune import FinetuneConfig

FLAGS_HEADER = """\
# Flags

Every flag of `pretrain_gpt.py` and `pretrain_bert.py`. `tools/finetune_bert.py` has those of the last table beside
them, and lacks those whose place these take: its `--help` has all. Names, meanings and defaults are Megatron-LM's
where it has the flag; [coming-from-megatron.md](coming-from-megatron.md) has its other flags. Where no default is
shown, the text says what leaving the flag out means.

Flags can also stand in a YAML file that `--config` names, without the dashes in front: `num-layers: 24`, `bf16: true`,
`data-path: [0.3, wiki, 0.7, books]`. A value on the command line wins over the file's; a switch that the file turns on
stays on.

This page is made by `python tools/document_flags.py`.
"""

# What follows this line in docs/coming-from-megatron.md is made here.
MARK = "<!-- made by python tools/document_flags.py -->\n"


def flags_page() -> str:
    """The flags of a training run, a table for each part of its configuration."""
    groups = {**typing.get_type_hints(RunConfig), "fine-tuning": FinetuneConfig}
    return FLAGS_HEADER + "".join(_table(name.replace("_", " "), config) for name, config in groups.items())


def _table(title: str, config: type[Config]) -> str:
    scalar_types = field_types(config)
    rows = [_row(field, scalar_types[field.name]) for field in dataclasses.fields(config)]
    return (
        f"\n## {title}\n\n{summary(config)}\n\n| Flag | Values | Default | Meaning |\n|---|---|---|---|\n"
        + "".join(rows)
    )


def _row(field: dataclasses.Field, scalar: type) -> str:
    spec: Flag = field.metadata["flag"]
    names = " ".join(f"`{name}`" for name in (flag_name(field), *spec.aliases))
    if scalar is bool:
        default = "off"
    elif spec.required:
        default = "(required)"
    else:
        values = field.default if isinstance(field.default, tuple) else (field.default,)
        default = "" if field.default is None else f"`{' '.join(map(str, values))}`"
    return f"| {names} | {_values(spec, scalar)} | {default} | {spec.help} |\n"


def _values(spec: Flag, scalar: type) -> str:
    """What a flag takes: its choices, or its type and range."""
    if spec.choices is not None:
        return ", ".join(f"`{choice}`" for choice in spec.choices)
    if scalar is str:
        return f"`{spec.metavar or 'TEXT'}{'...' if spec.nargs else ''}`"
    words = {bool: "switch", int: "whole number", float: "number"}[scalar] + ("s" if spec.nargs else "")
    bounds = [
        f"{sign} {bound}"
        for sign, bound in (("≥", spec.low), (">", spec.above), ("≤", spec.high), ("<", spec.below))
        if bound is not None
    ]
    text = " ".join([words, ", ".join(bounds)]).strip()
    return f"`{' '.join(spec.metavar)}`, {text}" if isinstance(spec.metavar, tuple) else text


def nvidia_table() -> str:
    """Every flag of Megatron-LM's that is known, in the order of the alphabet: what happens, and what differs."""
    rows = [(flag.usage, _what_happens(flag), flag.note) for flag in NVIDIA_FLAGS]
    for config in typing.get_type_hints(RunConfig).values():
        for field in dataclasses.fields(config):
            names = {flag_name(field), *field.metadata["flag"].aliases} - OURS_ALONE
            rows += [(name, "works", DEPARTURES.get(flag_name(field), "")) for name in names]
    rows.sort(key=lambda row: row[0].lower())
    return "| Flag | | |\n|---|---|---|\n" + "".join(
        f"| `{usage}` | {what} | {note} |\n" for usage, what, note in rows
    )


def _what_happens(flag: NvidiaFlag) -> str:
    if not flag.refused:
        return "no effect"
    harmless = ", ".join(f"`{value}`" for value in flag.harmless)
    return f"refused, but for {harmless}" if harmless else "refused"


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if a page is not up to date"
    )
    check = parser.parse_args(argv).check
    flags, coming = ROOT / "docs" / "flags.md", ROOT / "docs" / "coming-from-megatron.md"
    prose = coming.read_text(encoding="utf-8").partition(MARK)[0]
    for path, page in ((flags, flags_page()), (coming, prose + MARK + nvidia_table())):
        if not check:
            path.write_text(page, encoding="utf-8")
        elif path.read_text(encoding="utf-8") != page:
            raise InputError(f"docs/{path.name} is not up to date; run python tools/document_flags.py")


if __name__ == "__main__":
    run_command(main)
