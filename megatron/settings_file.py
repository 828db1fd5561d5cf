"""Read YAML files of settings.

Only the plain part of YAML is supported: mappings, lists and scalars. Anchors, aliases, merge keys and tags, with which
a small file can take all time and memory, are errors, and so is a duplicate key.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from megatron.errors import InputError

MAX_BYTES = 1 << 20
MAX_DEPTH = 8

_INTEGER = re.compile(r"[-+]?[0-9]{1,18}")
# With a point or an exponent: an integer too long stays text.
_FLOAT = re.compile(
    r"[-+]?([0-9]*\.[0-9]+|[0-9]+\.|[0-9]+(?=e))(e[-+]?[0-9]+)?|[-+]?\.(inf|nan)", re.IGNORECASE
)


def read_settings(path: Path) -> dict[str, Any]:
    """Read a file whose top level is a mapping, to values of the types bool, int, float, str, list, dict and None.

    Raises: InputError: the file is unreadable, larger than 1 MiB or not such a file. The message does not name it.
    """
    try:
        if not path.is_file() and not path.is_dir() and path.exists():
            raise InputError("is not a file")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})") from None
    if len(data) > MAX_BYTES:
        raise InputError(f"is larger than {MAX_BYTES} bytes; settings take a few hundred")
    try:
        text = data.decode("utf-8")
        _check_events(text)
        root = yaml.compose(text, yaml.BaseLoader)
    except InputError:
        raise
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        raise InputError(f"line {mark.line + 1}: is not YAML" if mark else "is not YAML") from None
    if not isinstance(root, yaml.MappingNode):
        raise InputError("must hold 'name: value' lines")
    return _mapping(root)


def _check_events(text: str) -> None:
    """Refuse what only hostile files have, before anything is built of it."""
    depth = 0
    for event in yaml.parse(text, yaml.BaseLoader):
        where = "" if event.start_mark is None else f"line {event.start_mark.line + 1}"
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise InputError(f"{where}: anchors and aliases are not supported; write the value out")
        tag = getattr(event, "tag", None)
        if tag is not None:
            raise InputError(f"{where}: tags are not supported; leave {tag[:40]} out")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise InputError(f"{where}: is nested more than {MAX_DEPTH} deep")


def _mapping(node: yaml.MappingNode) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in node.value:
        where = f"line {key.start_mark.line + 1}"
        if not isinstance(key, yaml.ScalarNode):
            raise InputError(f"{where}: a name must be text")
        if key.value == "<<":
            raise InputError(f"{where}: merge keys are not supported; write the values out")
        if key.value in values:
            raise InputError(f"{where}: {key.value[:60]} is given twice")
        values[key.value] = _value(value)
    return values


def _value(node: yaml.Node) -> Any:
    if isinstance(node, yaml.MappingNode):
        return _mapping(node)
    if isinstance(node, yaml.SequenceNode):
        return [_value(item) for item in node.value]
    assert isinstance(node, yaml.ScalarNode)
    text: str = node.value
    if node.style is not None:  # quoted, or a block
        return text
    if text in ("", "~", "null"):
        return None
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if _INTEGER.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text
