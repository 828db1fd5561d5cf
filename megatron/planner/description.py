"""A cluster described in a YAML file, with units: `bandwidth: 600 GB/s`."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from pathlib import Path
from typing import Any

import yaml

from megatron.flags import InputError, either
from megatron.planner.cluster import DATA_SHEET_REACHED, Cluster, Device, Link, Reached, device_of
from megatron.planner.devices import data_sheet

# Units by kind of quantity, each with an example for messages.
UNITS: dict[str, dict[str, float]] = {
    "memory": {"MB": 1e6, "GB": 1e9, "TB": 1e12, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40},
    "speed": {
        "MB/s": 1e6, "GB/s": 1e9, "TB/s": 1e12, "Mb/s": 1e6 / 8, "Gb/s": 1e9 / 8, "Tb/s": 1e12 / 8,
    },
    "arithmetic": {"GFLOP/s": 1e9, "TFLOP/s": 1e12, "PFLOP/s": 1e15},
    "time": {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0},
}  # fmt: skip
SHARES = ("product", "memory", "stream", "link", "attention")  # fields of `Reached`
EXAMPLES = {"memory": "80 GB", "speed": "600 GB/s", "arithmetic": "312 TFLOP/s", "time": "5 us"}


def quantity(text: object, kind: str) -> float:
    """A number with its unit, such as "80 GB", in bytes, bytes/s, FLOP/s or seconds.

    Raises:
        InputError: what is expected, without the name of the field.
    """
    units = UNITS[kind]
    match = re.fullmatch(r"\s*([\d.]+(?:[eE][+-]?\d+)?)\s*(\S+)\s*", text) if isinstance(text, str) else None
    try:
        value = float(match[1]) * units[match[2]] if match else math.nan
    except (ValueError, KeyError):
        value = math.nan
    if not 0 < value < math.inf:
        raise InputError(
            f"{text!r} is not a number above 0 with its unit, {either(units)}; write it like {EXAMPLES[kind]!r}"
        )
    return value


@dataclasses.dataclass
class _Section:
    """A mapping of the file: its fields are taken one by one, and what is left is an error."""

    values: dict[str, Any]
    where: str
    known: list[str] = dataclasses.field(default_factory=list)

    def take(self, name: str, default: Any = None) -> Any:
        self.known.append(name)
        value = self.values.get(name)
        value = default if value is None else value
        if value is None:
            others = [str(other) for other in self.values if other not in self.known]
            near = difflib.get_close_matches(name, others, n=1)
            meant = f", and {near[0]} is not a field" if near else ""
            raise InputError(f"{self.where}{name} is missing{meant}; docs/scaling.md has an example")
        return value

    def quantity(self, name: str, kind: str, default: str | None = None) -> float:
        value = self.take(name, default)
        try:
            return quantity(value, kind)
        except InputError as error:
            raise InputError(f"{self.where}{name}: {error}") from None

    def whole(self, name: str, default: int | None = None) -> int:
        value = self.take(name, default)
        if type(value) is not int or value < 1:
            raise InputError(f"{self.where}{name}: {value!r} is not a whole number of at least 1")
        return value

    def share(self, name: str, default: float) -> float:
        value = self.take(name, default)
        if type(value) not in (int, float) or not 0 < value <= 1:
            raise InputError(f"{self.where}{name}: {value!r} is not a share above 0 and up to 1")
        return float(value)

    def section(self, name: str, default: dict | None = None) -> _Section:
        value = self.take(name, default)
        if not isinstance(value, dict):
            raise InputError(
                f"{self.where}{name}: {value!r} is not a mapping of fields; docs/scaling.md has an example"
            )
        return _Section(value, f"{self.where}{name}.")

    def end(self) -> None:
        for name in self.values:
            if name not in self.known:
                known = ", ".join(dict.fromkeys(self.known))
                raise InputError(f"{self.where}{name} is not a field; known are {known}")


def read_cluster(path: Path) -> Cluster:
    """The cluster that a file describes (docs/scaling.md).

    Raises:
        InputError: naming the file, the field, and what is expected.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"--cluster {path}: cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        raise InputError(
            f"--cluster {path}: {f'line {mark.line + 1}: ' if mark else ''}is not YAML"
        ) from None
    if not isinstance(values, dict):
        raise InputError(f"--cluster {path}: must hold 'name: value' lines (docs/scaling.md)")
    try:
        return _cluster(_Section(values, ""))
    except InputError as error:
        raise InputError(f"--cluster {path}: {error}") from None


def _cluster(file: _Section) -> Cluster:
    nodes, per_node = file.whole("nodes"), file.whole("devices-per-node")
    cluster = Cluster(
        device=_device(file),
        devices=nodes * per_node,
        per_node=per_node,
        link=_link(file.section("link"), "3.4 us"),
        # Between the nodes of one there is nothing.
        network=_link(file.section("network", {"bandwidth": "1 GB/s"} if nodes == 1 else None), "9.6 us"),
        reached=_reached(file.section("reached", {})),
    )
    file.end()
    return cluster


def _device(file: _Section) -> Device:
    given = file.take("device")
    if isinstance(given, str):
        return device_of(data_sheet(given, where="device"))
    if not isinstance(given, dict):
        raise InputError(f"device: {given!r} is neither the name of a GPU nor a mapping of fields")
    fields = _Section(given, "device.")
    precision = fields.take("precision")
    if precision not in ("bf16", "fp16", "fp32"):
        raise InputError(f"device.precision: {precision!r} is not one of bf16, fp16, fp32")
    device = Device(
        name=str(fields.take("name")),
        precision=precision,
        peak=fields.quantity("peak", "arithmetic"),
        sms=fields.whole("processors", 1),
        memory=fields.quantity("memory", "memory"),
        bandwidth=fields.quantity("bandwidth", "speed"),
    )
    fields.end()
    return device


def _link(fields: _Section, latency: str) -> Link:
    link = Link(fields.quantity("bandwidth", "speed"), fields.quantity("latency", "time", latency))
    fields.end()
    return link


def _reached(fields: _Section) -> Reached:
    default = DATA_SHEET_REACHED
    shares = {name: fields.share(name, getattr(default, name)) for name in SHARES}
    reached = Reached(**shares, launch=fields.quantity("launch", "time", f"{1e6 * default.launch:g} us"))
    fields.end()
    return reached


def describe(cluster: Cluster) -> str:
    """The file that `read_cluster` reads as this cluster, to four digits."""
    device, reached = cluster.device, cluster.reached
    values = {
        "device": {
            "name": device.name,
            "precision": device.precision,
            "peak": f"{device.peak / 1e9:.4g} GFLOP/s",
            "processors": device.sms,
            "memory": f"{device.memory / 1e9:.4g} GB",
            "bandwidth": f"{device.bandwidth / 1e9:.4g} GB/s",
        },
        "devices-per-node": cluster.per_node,
        "nodes": cluster.nodes,
        "link": _link_values(cluster.link),
        "network": _link_values(cluster.network),
        "reached": {
            **{name: float(f"{getattr(reached, name):.4g}") for name in SHARES},
            "launch": f"{1e6 * reached.launch:.4g} us",
        },
    }
    return yaml.safe_dump(values, sort_keys=False)


def _link_values(link: Link) -> dict[str, str]:
    return {"bandwidth": f"{link.bandwidth / 1e6:.4g} MB/s", "latency": f"{1e6 * link.latency:.4g} us"}
