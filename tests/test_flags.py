"""The base class of all configs: types, choices and ranges are checked on construction."""

from __future__ import annotations

import dataclasses
import math

import pytest

from megatron.errors import InputError
from megatron.flags import Config, field_types, flag, flag_name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Oven(Config):
    """Example of a config."""

    trays: int = flag(2, "trays", low=1, high=4)
    heat: float = flag(180.0, "degrees", above=0, aliases=("--temperature",))
    mode: str = flag("fan", "how the heat moves", choices=("fan", "grill"))
    light: bool = flag(True, "no light")
    timer: bool = flag(False, "ring at the end")
    cake: str | None = flag(None, "what to bake")
    minutes: tuple[int, ...] | None = flag(None, "times to ring at", low=1, nargs="*")
    door_closed: bool = flag(True, "leave the door open", name="--open-door")
    made_from_others: int = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bread(Config):
    """Example of a config with a required field."""

    flour: int = flag(None, "grams of flour", low=1, required=True)
    seeds: str | None = flag(None, "what to strew on it", choices=("poppy", "sesame"))


def test_flag_names() -> None:
    names = {f.name: flag_name(f) for f in dataclasses.fields(Oven) if "flag" in f.metadata}
    assert names == {
        "trays": "--trays",
        "heat": "--heat",
        "mode": "--mode",
        "light": "--no-light",
        "timer": "--timer",
        "cake": "--cake",
        "minutes": "--minutes",
        "door_closed": "--open-door",
    }


def test_scalar_types_look_inside_optionals_and_lists() -> None:
    types = field_types(Oven)
    assert (types["trays"], types["heat"], types["cake"], types["minutes"]) == (int, float, str, int)
    assert "made_from_others" not in types


def test_good_values_pass_and_whole_numbers_become_floats() -> None:
    oven = Oven(heat=200, minutes=[5, 10])
    assert oven.heat == 200.0
    assert isinstance(oven.heat, float)
    assert oven.minutes == (5, 10)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"trays": "2"}, "--trays: '2' is not an integer"),
        ({"trays": 2.0}, "--trays: 2.0 is not an integer"),
        ({"trays": True}, "--trays: True is not an integer"),
        ({"trays": 0}, "--trays: 0 is too small; it must be at least 1"),
        ({"trays": 5}, "--trays: 5 is too large; it must be at most 4"),
        ({"heat": "hot"}, "--heat: 'hot' is not a number"),
        ({"heat": True}, "--heat: True is not a number"),
        ({"heat": 0}, "--heat: 0.0 is too small; it must be greater than 0"),
        ({"heat": math.nan}, "--heat: nan is not a finite number"),
        ({"heat": math.inf}, "--heat: inf is not a finite number"),
        ({"heat": -math.inf}, "--heat: -inf is not a finite number"),
        ({"mode": "steam"}, "--mode: 'steam' is not one of fan, grill"),
        ({"light": 1}, "--no-light: 1 is not true or false"),
        ({"cake": 7}, "--cake: 7 is not text"),
        ({"minutes": "5"}, "--minutes: '5' is not a list of values"),
        ({"minutes": 5}, "--minutes: 5 is not a list of values"),
        ({"minutes": [5, 0]}, "--minutes: 0 is too small; it must be at least 1"),
    ],
)
def test_bad_values_are_named(values: dict, message: str) -> None:
    with pytest.raises(InputError) as error:
        Oven(**values)
    assert str(error.value) == message


def test_require() -> None:
    Oven(cake="apple").require("cake")
    with pytest.raises(InputError, match=r"^--cake is required: what to bake$"):
        Oven().require("cake")
    with pytest.raises(InputError, match=r"^--seeds is required: what to strew on it; one of poppy, sesame$"):
        Bread(flour=500).require("seeds")


def test_required_fields() -> None:
    assert Bread(flour=500).flour == 500
    with pytest.raises(InputError, match=r"^--flour is required: grams of flour$"):
        Bread(seeds="poppy")
    with pytest.raises(InputError, match=r"^--flour: 0 is too small"):
        Bread(flour=0)


def test_configs_are_frozen_and_errors_are_value_errors() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Oven().trays = 3
    assert issubclass(InputError, ValueError)
