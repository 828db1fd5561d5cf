"""How a configuration dataclass describes its command-line flags, and the one error type for wrong input.

Every subsystem owns a frozen, keyword-only dataclass derived from `Config`. Each field is made by `flag()`,
which records the help line, the choices and the range. `megatron.arguments` turns the fields into flags; the
checks here run wherever the dataclass is built, so a library user meets the same messages.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
import types
import typing
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

# No whole number of a flag is larger, so that products of two do not overflow a float.
LARGEST = 2**53


class InputError(ValueError):
    """Something the user gave is wrong: a flag, a file, a checkpoint.

    The message names the flag or file (and line), the value, and what would be right. Entry points print it
    as one line and exit with status 2; every other exception is a fault of ours and keeps its traceback.
    """

    exit_status = 2


class TrainingFault(RuntimeError):
    """Training cannot go on, and starting it again as it is would not help."""

    exit_status = 1


class PassingFault(TrainingFault):
    """Training cannot go on, but may when it is started again: a process is gone, or a machine miscalculates."""

    # Above 127 as after a signal: what restarts on such statuses (Kubeflow's ExitCode policy) restarts on this.
    exit_status = 200


class LostRank(PassingFault):
    """A communication failed, because another process has ended or hangs."""


def tell(message: str) -> None:
    """Tell of what ends this process: the terminal, and torchrun, whose summary shows it for each process.

    What is wrong with the flags is wrong on every rank, so the terminal is told by rank 0 alone, unless no
    torchrun is there to tell of the others.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None or os.environ.get("RANK", "0") == "0":
        print(message, file=sys.stderr, flush=True)
    else:
        time.sleep(1)  # torchrun ends all as soon as one has ended, rank 0 perhaps before it has printed
    if path is not None:
        # The form that torch.distributed.elastic writes for exceptions, less the traceback.
        told = {"message": {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}}
        Path(path).write_text(json.dumps(told), encoding="utf-8")


@dataclasses.dataclass(frozen=True)
class Flag:
    """What the command line needs to know of one field. Made by `flag()`."""

    help: str
    choices: tuple[Any, ...] | None = None
    low: float | None = None
    above: float | None = None
    high: float | None = None
    below: float | None = None
    nargs: int | str | None = None
    name: str | None = None
    aliases: tuple[str, ...] = ()
    metavar: str | tuple[str, ...] | None = None
    required: bool = False


def flag(
    default: Any,
    help: str,
    *,
    choices: Sequence[Any] | None = None,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    below: float | None = None,
    nargs: int | str | None = None,
    name: str | None = None,
    aliases: Sequence[str] = (),
    metavar: str | tuple[str, ...] | None = None,
    required: bool = False,
) -> Any:
    """A dataclass field that is also a command-line flag.

    `low` and `high` are inclusive bounds, `above` and `below` exclusive ones. `name` replaces the flag name
    made from the field name (`--no-...` for booleans that default to true); `aliases` are further names. A
    `required` field is an error when it is None, its default.
    """
    spec = Flag(
        help=help,
        choices=tuple(choices) if choices is not None else None,
        low=low,
        above=above,
        high=high,
        below=below,
        nargs=nargs,
        name=name,
        aliases=tuple(aliases),
        metavar=metavar,
        required=required,
    )
    return dataclasses.field(default=default, metadata={"flag": spec})


def flag_name(field: dataclasses.Field) -> str:
    """The flag that sets `field`: `--num-layers` for `num_layers`, `--no-x` for a boolean x that is true."""
    spec: Flag = field.metadata["flag"]
    if spec.name:
        return spec.name
    dashed = field.name.replace("_", "-")
    return f"--no-{dashed}" if field.default is True else f"--{dashed}"


def value_type(annotation: Any) -> type:
    """The scalar type inside an annotation: `int` for `int | None`, `str` for `tuple[str, ...] | None`."""
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        annotation = next(a for a in typing.get_args(annotation) if a is not type(None))
    if typing.get_origin(annotation) is tuple:
        annotation = typing.get_args(annotation)[0]
    return annotation


def field_types(cls: type) -> dict[str, type]:
    """Scalar type of each flag of a config class, by field name."""
    hints = typing.get_type_hints(cls)
    return {f.name: value_type(hints[f.name]) for f in dataclasses.fields(cls) if "flag" in f.metadata}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Base of all configuration dataclasses: checks when built that values are there, their types and ranges.

    Raises:
        InputError: naming the flag, the value and what would be right.
    """

    def __post_init__(self) -> None:
        scalar_types = field_types(type(self))
        for field in dataclasses.fields(self):
            if "flag" not in field.metadata:
                continue
            value = getattr(self, field.name)
            if value is None:
                if field.metadata["flag"].required:
                    self.require(field.name)
                continue
            if field.metadata["flag"].nargs:
                if isinstance(value, str) or not isinstance(value, Sequence):
                    raise InputError(f"{flag_name(field)}: {value!r} is not a list of values")
                value = tuple(_checked(field, v, scalar_types[field.name]) for v in value)
            else:
                value = _checked(field, value, scalar_types[field.name])
            object.__setattr__(self, field.name, value)

    def require(self, *names: str) -> None:
        """Raise `InputError` unless each of these fields, which not every use of the config needs, has a value."""
        by_name = {f.name: f for f in dataclasses.fields(self)}
        for name in names:
            if getattr(self, name) is None:
                field = by_name[name]
                spec: Flag = field.metadata["flag"]
                choices = f"; one of {', '.join(map(str, spec.choices))}" if spec.choices else ""
                raise InputError(f"{flag_name(field)} is required: {spec.help}{choices}")


def _checked(field: dataclasses.Field, value: Any, scalar: type) -> Any:
    spec: Flag = field.metadata["flag"]
    name = flag_name(field)
    if scalar is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not scalar:
        raise InputError(f"{name}: {value!r} is not {_type_words[scalar]}")
    if spec.choices is not None and value not in spec.choices:
        raise InputError(f"{name}: {value!r} is not one of {', '.join(map(str, spec.choices))}")
    if scalar in (int, float):
        if value != value or value in (float("inf"), float("-inf")):
            raise InputError(f"{name}: {value} is not a finite number")
        if spec.low is not None and value < spec.low:
            raise InputError(f"{name}: {value} is too small; it must be at least {spec.low}")
        if spec.above is not None and value <= spec.above:
            raise InputError(f"{name}: {value} is too small; it must be greater than {spec.above}")
        if spec.below is not None and value >= spec.below:
            raise InputError(f"{name}: {value} is too large; it must be less than {spec.below}")
        high = LARGEST if spec.high is None and scalar is int else spec.high
        if high is not None and value > high:
            raise InputError(f"{name}: {value} is too large; it must be at most {high}")
    return value


def either(values: Iterable[Any]) -> str:
    """Values to choose from, in words: "1, 2 or 4"."""
    *others, last = map(str, values)
    return f"{', '.join(others)} or {last}" if others else last


_type_words = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
