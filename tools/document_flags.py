"""Write docs/flags.md and the table in docs/coming-from-megatron.md, the references of the command line.

python tools/document_flags.py [--check]
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import megatron.plugins  # noqa: F401 (registers the flags of plug-ins)
from megatron.cli import Parser, run_command, summary
from megatron.errors import InputError
from megatron.finetuning.finetune import FinetuneConfig
from megatron.flags import Config, Flag, field_types, flag_name
from megatron.interop.nvidia.flag_table import NvidiaFlag
from megatron.interop.nvidia.flags import DEPARTURES, NVIDIA_FLAGS, OURS_ALONE
from megatron.training.config import RunConfig

FLAGS_HEADER = """\
# Flags

Every flag of `pretrain_gpt.py` and `pretrain_bert.py`. `tools/finetune_bert.py` adds those of the last table and lacks
those that they replace; its `--help all` lists all. Names, meanings and defaults are Megatron-LM's if it has the flag;
[coming-from-megatron.md](coming-from-megatron.md) lists its other flags. If no default is shown, the text explains what
happens without the flag.

`--config` reads flags from a YAML file, without the leading dashes: `num-layers: 24`, `bf16: true`,
`data-path: [0.3, wiki, 0.7, books]`. The command line overrides the file, but cannot turn off a switch that the file
turns on, and adds to its `--freeze`. Anchors, aliases, merge keys and tags of YAML are errors.

`python tools/document_flags.py` writes this page.
"""

# The rest of docs/coming-from-megatron.md after this line is generated.
MARK = "<!-- made by python tools/document_flags.py -->\n"


def flags_page() -> str:
    """The flags of a training run, with a table for each section of the configuration."""
    groups = {**RunConfig.section_types(), "fine-tuning": FinetuneConfig}
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
    meaning = spec.help.replace("|", "\\|")
    return f"| {names} | {_values(spec, scalar)} | {default} | {meaning} |\n"


def _values(spec: Flag, scalar: type) -> str:
    """The values of a flag: its choices, or its type and range."""
    if spec.choices is not None:
        return ", ".join(f"`{choice}`" for choice in spec.choices)
    if scalar is str:
        return f"`{spec.metavar or 'TEXT'}{'...' if spec.nargs else ''}`"
    words = {bool: "switch", int: "integer", float: "number"}[scalar] + ("s" if spec.nargs else "")
    bounds = [
        f"{sign} {bound}"
        for sign, bound in (("≥", spec.low), (">", spec.above), ("≤", spec.high), ("<", spec.below))
        if bound is not None
    ]
    text = " ".join([words, ", ".join(bounds)]).strip()
    return f"`{' '.join(spec.metavar)}`, {text}" if isinstance(spec.metavar, tuple) else text


def nvidia_table() -> str:
    """Every known flag of Megatron-LM, sorted, with its effect here and any difference."""
    rows = [(flag.usage, _effect(flag), flag.note) for flag in NVIDIA_FLAGS]
    for config in RunConfig.section_types().values():
        for field in dataclasses.fields(config):
            names = {flag_name(field), *field.metadata["flag"].aliases} - OURS_ALONE
            rows += [(name, "works", DEPARTURES.get(flag_name(field), "")) for name in names]
    rows.sort(key=lambda row: row[0].lower())
    return "| Flag | | |\n|---|---|---|\n" + "".join(
        f"| `{usage}` | {what} | {note} |\n" for usage, what, note in rows
    )


def _effect(flag: NvidiaFlag) -> str:
    if not flag.refused:
        return "read as" if flag.instead else "no effect"
    harmless = ", ".join(f"`{value}`" for value in flag.harmless)
    return f"refused, except {harmless}" if harmless else "refused"


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is out of date")
    check = parser.parse_args(argv).check
    flags, coming = ROOT / "docs" / "flags.md", ROOT / "docs" / "coming-from-megatron.md"
    prose = coming.read_text(encoding="utf-8").partition(MARK)[0]
    for path, page in ((flags, flags_page()), (coming, prose + MARK + nvidia_table())):
        if not check:
            path.write_text(page, encoding="utf-8")
        elif path.read_text(encoding="utf-8") != page:
            raise InputError(f"docs/{path.name} is out of date; run python tools/document_flags.py")


if __name__ == "__main__":
    run_command(main)
