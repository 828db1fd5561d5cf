"""Configuration dataclasses whose fields are command-line flags.

Every subsystem owns a frozen, keyword-only dataclass derived from `Config`. Each field is made by `flag()`, which
records the help line, the choices and the range. `megatron.cli` turns the fields into flags. The checks here run when
the dataclass is built, so code that builds one directly gets the same messages.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from megatron.errors import InputError

# The largest integer that a flag accepts: a product of two does not overflow a float.
LARGEST = 2**53
type_hints = functools.cache(typing.get_type_hints)  # a command line needs those of each class twice


@dataclasses.dataclass(frozen=True)
class Flag:
    """The description of one flag, made by `flag()`.

    Attributes:
        low, high: inclusive bounds.
        above, below: exclusive bounds.
        nargs, metavar: as in argparse.
        repeats: the flag may be given several times, and its values add up.
        name: replaces the name made from the field's (`--no-...` for booleans that default to true).
        aliases: further names.
        required: building the config raises `InputError` if the value is None, which is the default.
    """

    help: str
    choices: Collection[Any] | None = None
    low: float | None = None
    above: float | None = None
    high: float | None = None
    below: float | None = None
    nargs: int | str | None = None
    repeats: bool = False
    metavar: str | tuple[str, ...] | None = None
    name: str | None = None
    aliases: Sequence[str] = ()
    required: bool = False


def flag(default: Any, help: str, **description: Any) -> Any:
    """Make a dataclass field that is also a command-line flag; `description` holds the attributes of `Flag`."""
    return dataclasses.field(default=default, metadata={"flag": Flag(help, **description)})


def flag_name(field: dataclasses.Field) -> str:
    """The flag that sets `field`: `--num-layers` for `num_layers`, `--no-x` for a boolean x that is true."""
    spec: Flag = field.metadata["flag"]
    if spec.name:
        return spec.name
    dashed = field.name.replace("_", "-")
    return f"--no-{dashed}" if field.default is True else f"--{dashed}"


def value_type(annotation: Any) -> type:
    """The scalar type inside an annotation: `int` for `int | None`, `str` for `tuple[str, ...] | None`."""
    inner = [a for a in typing.get_args(annotation) if a not in (type(None), ...)]
    return value_type(inner[0]) if inner else annotation


def field_types(cls: type) -> dict[str, type]:
    """The scalar type of each flag of a config class, by field name."""
    hints = type_hints(cls)
    return {f.name: value_type(hints[f.name]) for f in dataclasses.fields(cls) if "flag" in f.metadata}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The base of all configuration dataclasses.

    Building one checks the presence, type and range of every value.

    Raises:
        InputError: a value is missing or wrong; the message names the flag, the value and the accepted values.
    """

    def __post_init__(self) -> None:
        scalar_types = field_types(type(self))
        for field in (x for x in dataclasses.fields(self) if x.name in scalar_types):
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

    def require(self, *names: str) -> tuple[Any, ...]:
        """Return the values of fields that some uses of the config do not need. Raise `InputError` if one is None."""
        for name in names:
            if getattr(self, name) is None:
                field = self.__dataclass_fields__[name]
                spec: Flag = field.metadata["flag"]
                choices = f"; one of {', '.join(map(str, spec.choices))}" if spec.choices else ""
                raise InputError(f"{flag_name(field)} is required: {spec.help}{choices}")
        return tuple(getattr(self, name) for name in names)


def _checked(field: dataclasses.Field, value: Any, scalar: type) -> Any:
    """Check one value of a field; returns it, an integer for a float field as a float."""
    spec: Flag = field.metadata["flag"]
    name = flag_name(field)
    if scalar is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not scalar:
        raise InputError(f"{name}: {value!r} is not {TYPE_WORDS[scalar]}")
    if spec.choices is not None and value not in spec.choices:
        raise InputError(f"{name}: {value!r} is not one of {', '.join(map(str, spec.choices))}")
    if scalar is not bool and isinstance(value, int | float):
        if value != value or value in (float("inf"), float("-inf")):
            raise InputError(f"{name}: {value} is not a finite number")
        if spec.low is not None and value < spec.low:
            raise InputError(f"{name}: {value} is too small; it must be at least {spec.low}")
        if spec.above is not None and value <= spec.above:
            raise InputError(f"{name}: {value} is too small; it must be greater than {spec.above}")
        if spec.below is not None and value >= spec.below:
            raise InputError(f"{name}: {value} is too large; it must be less than {spec.below}")
        high = LARGEST if spec.high is None and isinstance(value, int) else spec.high
        if high is not None and value > high:
            raise InputError(f"{name}: {value} is too large; it must be at most {high}")
    return value


def either(values: Iterable[Any]) -> str:
    """Join alternatives in words: "1, 2 or 4"."""
    *others, last = map(str, values)
    return f"{', '.join(others)} or {last}" if others else last


TYPE_WORDS = {int: "an integer", float: "a number", str: "text", bool: "true or false"}
