"""Settings from a YAML file (--config)."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.cli import Parser, clipped, nonempty
from megatron.errors import InputError
from megatron.settings_file import read_settings


def add_config_flag(parser: Parser) -> None:
    """Add --config to a parser."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="YAML file of flags without their leading dashes; the command line overrides it, but cannot turn off "
        "a switch that the file turns on, and adds to its --freeze",
    )


def parse_config_file(argv: Sequence[str], parser: Parser, namespace: argparse.Namespace) -> None:
    """Parse the settings of the file that `argv` names, if any, as if they stood before the command line.

    Raises:
        InputError: the file cannot be read, or a setting is wrong.
    """
    path = _config_file(argv)
    if path is not None:
        try:
            parser.parse_args(_read_settings(path, parser), namespace)
        except InputError as error:
            raise InputError(f"--config {path}: {error}") from None


def _config_file(argv: Sequence[str]) -> Path | None:
    finder = Parser(add_help=False)
    finder.add_argument("--config", type=nonempty)
    found, _ = finder.parse_known_args(argv)
    return None if found.config is None else Path(found.config)


def _read_settings(path: Path, parser: Parser) -> list[str]:
    """Convert the settings in a YAML file to command-line arguments."""
    flags = parser.flags
    names = {name.replace("_", "-"): name for name in flags}
    arguments: list[str] = []
    spelled: dict[int, str] = {}  # how the file names each flag
    for key, value in read_settings(path).items():
        dashed = "--" + key.replace("_", "-")
        if dashed in ("--config", "--help", "--version"):
            raise InputError(f"{key}: belongs on the command line")
        name = names.get(dashed)
        if name is None:
            arguments.append(dashed)  # the parser rejects an unknown name and suggests another
            continue
        action = flags[name]
        if id(action) in spelled:
            raise InputError(f"{spelled[id(action)]} and {key} are the same flag; leave one of them out")
        spelled[id(action)] = key
        arguments += _setting(name, value, action)
    return arguments


def _setting(name: str, value: Any, action: argparse.Action) -> list[str]:
    """Convert one setting to command-line arguments; null means that the flag is not given."""
    if value is None:
        return []
    shown = "a mapping" if isinstance(value, dict) else clipped(value)
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise InputError(f"{name}: {shown} is not true or false")
        return [name] if value else []
    several = action.nargs not in (None, 1)
    values = value if several and isinstance(value, list) else [value]
    if any(isinstance(v, bool) or not isinstance(v, str | int | float) for v in values):
        raise InputError(f"{name}: {shown} is not {'a list of values' if several else 'a single value'}")
    return [name, *map(str, values)] if several else [f"{name}={value}"]
