"""The command line of every entry point and tool: flags from config dataclasses, help, errors and exit statuses.

Only this module and `megatron.arguments` know argparse. The name, default and range of a flag stand with its field in a
config dataclass (`megatron.flags`).
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import errno
import functools
import importlib
import os
import re
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from megatron.errors import InputError, TrainingFault, report_fatal
from megatron.flags import TYPE_WORDS, Config, Flag, field_types, flag_name

C = TypeVar("C", bound=Config)

# Names that other programs give to flags, with the flag to use instead. Filled by `megatron.plugins`.
OTHER_NAMES: dict[str, str] = {}


class Parser(argparse.ArgumentParser):
    """An argument parser that accepts no abbreviations, raises `InputError`, and suggests a near flag, or `hint`."""

    def __init__(self, hint: str = "--help lists the flags", **kwargs: Any) -> None:
        self.hint = hint
        kwargs.setdefault("formatter_class", HelpFormatter)
        super().__init__(allow_abbrev=False, **kwargs)
        # By default argparse reads -1 as a value but -1e-4 and -inf as flags.
        self._negative_number_matcher = re.compile(r"-(\.?\d|inf|nan)", re.IGNORECASE)

    @property
    def flags(self) -> dict[str, argparse.Action]:
        """The action of each flag, by name."""
        return self._option_string_actions

    def error(self, message: str) -> NoReturn:
        message = message.replace("argument -", "-", 1)
        raise InputError(message.replace("ignored explicit argument", "takes no value, but was given"))

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> argparse.Namespace:  # type: ignore[override]
        """Parse words, with dashes for underscores. One error names all unknown flags and all `refusals`."""
        words = [self._dashed(word) for word in (sys.argv[1:] if args is None else args)]
        namespace, unknown = self.parse_known_args(words, namespace)
        # The words after an unknown flag are its values.
        faults = [self._fault(word) for i, word in enumerate(unknown) if i == 0 or word.startswith("--")]
        faults += getattr(namespace, "refusals", [])
        if faults:
            raise InputError("\n".join(dict.fromkeys(faults)))
        return namespace

    def _dashed(self, word: str) -> str:
        name, equals, value = word.partition("=")
        dashed = name.replace("_", "-")
        known = name.startswith("--") and name not in self.flags and dashed in self.flags
        return f"{dashed}{equals}{value}" if known else word

    def _fault(self, word: str) -> str:
        name = word.split("=", 1)[0]
        if not name.startswith("-"):
            return f"{name!r} is not expected here; every value follows its flag"
        ours = [name for name, action in self.flags.items() if action.help != argparse.SUPPRESS]
        near = difflib.get_close_matches(name, ours, n=1, cutoff=0.8)
        hint = f"did you mean {near[0]}?" if near else self.hint
        # The flag's own name is the first word.
        instead = OTHER_NAMES.get(name.replace("_", "-"), "")
        if instead and instead.replace(",", "").split()[0] in ours:
            hint = f"use {instead}"
        return f"{name} is not a flag of this command; {hint}"


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Help with room for long flag names, which marks required flags and shows defaults.

    The usage line names only the arguments that argparse itself requires.
    """

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=110)

    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: Any = None) -> None:
        needed = [" ".join([*a.option_strings, a.metavar or a.dest.upper()]) for a in actions if a.required]
        super().add_usage(" ".join(["%(prog)s", *needed, "[flags]"]), actions, groups, prefix)

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        if action.required and action.option_strings:
            return f"{text} (required)"
        shown = action.const is None and action.default not in (None, argparse.SUPPRESS)
        return text if not shown or "default" in text else f"{text} (default: %(default)s)"


def add_flags(
    parser: argparse.ArgumentParser,
    config: type[Config],
    title: str,
    defaults: Mapping[str, Any] | None = None,
    without: Container[str] = (),
) -> None:
    """Add the flags of a config dataclass as one group of `--help`.

    The namespace lacks a flag that is not given, so that a settings file can supply it.

    Args:
        defaults: values, by field, that the command prefers to the dataclass's defaults.
        without: fields that the command has no flag for.
    """
    group = parser.add_argument_group(title, summary(config))
    scalar_types = field_types(config)
    for field in dataclasses.fields(config):
        if "flag" in field.metadata and field.name not in without:
            default = (defaults or {}).get(field.name, field.default)
            _add_flag(group, field, scalar_types[field.name], default)


def summary(config: type[Config]) -> str:
    """The first line of a config's docstring, which describes its group of flags."""
    return (config.__doc__ or "").splitlines()[0]


def _add_flag(group: argparse._ArgumentGroup, field: dataclasses.Field, scalar: type, default: Any) -> None:
    spec: Flag = field.metadata["flag"]
    names = (flag_name(field), *spec.aliases)
    common: dict[str, Any] = {
        "dest": field.name,
        "default": argparse.SUPPRESS,
        "help": spec.help.replace("%", "%%"),
    }
    if scalar is bool:
        group.add_argument(*names, action="store_const", const=not field.default, **common)
        return
    if spec.required and default is None:
        common["help"] += " (required)"
    elif default is not None and "default" not in spec.help:
        shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
        common["help"] += f" (default: {shown})"
    if spec.choices is not None:
        metavar: str | tuple[str, ...] = "{" + ",".join(map(str, spec.choices)) + "}"
    else:
        metavar = spec.metavar or {int: "N", float: "X", str: "TEXT"}[scalar]
    common["action"] = "extend" if spec.repeats else "store"
    convert: Callable[[str], Any] = nonempty if scalar is str else functools.partial(_number, scalar)
    group.add_argument(*names, type=convert, nargs=spec.nargs, metavar=metavar, **common)


def clipped(value: Any) -> str:
    """A value for a message, cut off after 60 characters."""
    text = repr(value)
    return text if len(text) <= 61 else f"{text[:61]}..."


def _number(kind: type, text: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{clipped(text)} is not {TYPE_WORDS[kind]}") from None


def nonempty(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("is empty; give a value, or leave the flag out")
    if text.encode(errors="ignore").decode() != text:
        raise argparse.ArgumentTypeError(f"{clipped(text)} is not UTF-8 text, which files' names must be")
    return text


def make_config(config: type[C], values: Mapping[str, Any]) -> C:
    """Build a config from the values that name its fields, ignoring the others."""
    names = {f.name for f in dataclasses.fields(config)}
    return config(**{k: v for k, v in values.items() if k in names})


def run_command(main: Callable[[], int | None] | str) -> NoReturn:
    """Run a command's `main`, or that of the module so named, and exit with the status that it returns (None for 0).

    An `InputError` or `TrainingFault` is printed as one line and exits with its own status. Ctrl-C exits with 130.
    """
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115, the caller has closed it
    sys.stderr = sys.stderr or sys.stdout
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr] # paths on an ASCII terminal
    try:
        code = importlib.import_module(main).main() if isinstance(main, str) else main()
    except (InputError, TrainingFault) as error:
        report_fatal(f"error: {error}")
        code = error.exit_status
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        code = 130
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC) or error.filename is not None:
            raise
        # The reader of the output (head, less) has exited, or the output's disk is full.
        if code := int(error.errno == errno.ENOSPC):
            report_fatal(f"error: the output cannot be written: {error.strerror}")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what is still in its buffer
    if os.environ.get("WORLD_SIZE", "1") != "1":
        # Skip the interpreter's shutdown: it sometimes aborts while gloo or NCCL threads still run, and torchrun would
        # report the run as failed. Every file is closed by now.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)
    sys.exit(code)
