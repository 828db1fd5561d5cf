"""The command line: configuration dataclasses to flags and back.

This is the only module that knows argparse. Flags carry Megatron-LM's names; what a flag means, its default
and its range stand with its field in the subsystem's config dataclass.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

from megatron.flags import Config, Flag, InputError, field_types, flag_name

C = TypeVar("C", bound=Config)


class Parser(argparse.ArgumentParser):
    """An argument parser that admits no abbreviations, raises `InputError`, and suggests the nearest flag."""

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", HelpFormatter)
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise InputError(message.replace("argument -", "-", 1))

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> argparse.Namespace:
        namespace, unknown = self.parse_known_args(args, namespace)
        if unknown:
            name = unknown[0].split("=", 1)[0]
            if not name.startswith("-"):
                raise InputError(f"{name!r} is not expected here; every value follows its flag")
            near = difflib.get_close_matches(name, self._option_string_actions, n=1)
            hint = f"did you mean {near[0]}?" if near else "--help lists the flags"
            raise InputError(f"{name} is not a flag of this command; {hint}")
        return namespace


class HelpFormatter(argparse.HelpFormatter):
    """Wide enough for long flag names; adds the default where there is one to state."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=110)

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        shown = action.const is None and action.default not in (None, argparse.SUPPRESS)
        return text if not shown or "default" in text else f"{text} (default: %(default)s)"


def add_flags(parser: argparse.ArgumentParser, config: type[Config], title: str) -> None:
    """Add the flags of a config dataclass as one `--help` group.

    A flag that is not given stays out of the namespace, so that a file of settings can supply it.
    """
    group = parser.add_argument_group(title)
    scalar_types = field_types(config)
    for field in dataclasses.fields(config):
        if "flag" in field.metadata:
            _add_flag(group, field, scalar_types[field.name])


def _add_flag(group: argparse._ArgumentGroup, field: dataclasses.Field, scalar: type) -> None:
    spec: Flag = field.metadata["flag"]
    names = (flag_name(field), *spec.aliases)
    common = {"dest": field.name, "default": argparse.SUPPRESS, "help": spec.help.replace("%", "%%")}
    if scalar is bool:
        group.add_argument(*names, action="store_const", const=not field.default, **common)
        return
    if field.default is not None and "default" not in spec.help:
        common["help"] += f" (default: {field.default})"
    if spec.choices is not None:
        common["help"] += f"; one of {', '.join(map(str, spec.choices))}"
    metavar = spec.metavar or {int: "N", float: "X", str: "TEXT"}[scalar]
    convert = {int: _whole, float: _number, str: str}[scalar]
    group.add_argument(*names, type=convert, nargs=spec.nargs, metavar=metavar, **common)


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def make_config(config: type[C], values: dict[str, Any]) -> C:
    """Build `config` from the values that name its fields; others are left alone."""
    names = {f.name for f in dataclasses.fields(config)}
    return config(**{k: v for k, v in values.items() if k in names})


def run_command(main: Callable[[], int | None]) -> NoReturn:
    """Run a command's `main` and exit: 0 when done, 2 with one line on wrong input, 130 on Ctrl-C."""
    try:
        code = main()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        code = 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        code = 130
    except BrokenPipeError:
        # The reader of our output (head, less) has gone; what it asked for is done.
        sys.stderr.close()
        code = 0
    sys.exit(code)
