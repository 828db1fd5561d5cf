"""Read and write the YAML description of a cluster, with units: `bandwidth: 600 GB/s`."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from pathlib import Path
from typing import Any

import yaml

from megatron.errors import InputError
from megatron.flags import either
from megatron.planner.cluster import (
    DATA_SHEET_EFFICIENCY,
    Cluster,
    Device,
    Efficiency,
    Host,
    Link,
    Measured,
    device_from_data_sheet,
    host_from_data_sheet,
)
from megatron.planner.device_specs import data_sheet
from megatron.planner.profiles import find_constants
from megatron.settings_file import read_settings

# Units by kind of quantity.
UNITS: dict[str, dict[str, float]] = {
    "memory": {"MB": 1e6, "GB": 1e9, "TB": 1e12, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40},
    "speed": {
        "MB/s": 1e6, "GB/s": 1e9, "TB/s": 1e12, "Mb/s": 1e6 / 8, "Gb/s": 1e9 / 8, "Tb/s": 1e12 / 8,
    },
    "arithmetic": {"GFLOP/s": 1e9, "TFLOP/s": 1e12, "PFLOP/s": 1e15},
    "time": {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0},
}  # fmt: skip
SHARES = ("matmul", "memory", "stream", "link", "attention", "network", "beside")  # fields of `Efficiency`
# And those that compare two speeds, or may be above 1.
RATIOS = ("attention_backward", "context", "fp8", "expert", "accumulate", "all_to_all", "send")
EXAMPLES = {"memory": "80 GB", "speed": "600 GB/s", "arithmetic": "312 TFLOP/s", "time": "5 us"}


def quantity(text: object, kind: str) -> float:
    """Parse a number with its unit, such as "80 GB", to bytes, bytes/s, FLOP/s or seconds.

    Raises:
        InputError: the text is not a quantity; the message lacks the field's name.
    """
    units = UNITS[kind]
    match = re.fullmatch(r"\s*([\d.]+(?:[eE][+-]?\d+)?)\s*(\S+)\s*", text) if isinstance(text, str) else None
    try:
        value = float(match[1]) * units[match[2]] if match else math.nan
    except (ValueError, KeyError):
        value = math.nan
    if not 0 < value < math.inf:
        raise InputError(
            f"{text!r} is not a positive number with a unit ({either(units)}); write it like {EXAMPLES[kind]!r}"
        )
    return value


@dataclasses.dataclass
class _Section:
    """A mapping in the file. Fields are taken one by one; any that remain at `end` are an error."""

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
            hint = f", and {near[0]} is not a field" if near else ""
            raise InputError(f"{self.where}{name} is missing{hint}; docs/scaling.md has an example")
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
            raise InputError(f"{self.where}{name}: {value!r} is not an integer of at least 1")
        return value

    def share(self, name: str, default: float) -> float:
        value = self.take(name, default)
        if type(value) not in (int, float) or not 0 < value <= 1:
            raise InputError(f"{self.where}{name}: {value!r} must be above 0 and at most 1")
        return float(value)

    def positive(self, name: str, default: float) -> float:
        value = self.take(name, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise InputError(f"{self.where}{name}: {value!r} is not a number above 0")
        return float(value)

    def section(self, name: str, default: dict | None = None) -> _Section:
        value = self.take(name, default)
        if not isinstance(value, dict):
            raise InputError(
                f"{self.where}{name}: {value!r} is not a mapping; docs/scaling.md has an example"
            )
        return _Section(value, f"{self.where}{name}.")

    def end(self) -> None:
        for name in self.values:
            if name not in self.known:
                known = ", ".join(dict.fromkeys(self.known))
                raise InputError(f"{self.where}{name} is not a field; the fields are {known}")


def read_cluster(path: Path) -> Cluster:
    """Read the description of a cluster (docs/scaling.md).

    Raises:
        InputError: names the file, the field and the expected value.
    """
    try:
        return _cluster(_Section(read_settings(path), ""))
    except InputError as error:
        raise InputError(f"--cluster {path}: {error}") from None


def _cluster(file: _Section) -> Cluster:
    nodes, per_node = file.whole("nodes"), file.whole("devices-per-node")
    domain = file.whole("nvlink-domain", per_node)
    if domain % per_node:
        raise InputError(f"nvlink-domain: {domain} devices are not whole nodes of {per_node}")
    device = _device(file)
    # A GPU of the table has the efficiencies that --gpu takes for it.
    named = isinstance(file.values["device"], str)
    usual = find_constants(device.name).efficiency if named else DATA_SHEET_EFFICIENCY
    cluster = Cluster(
        device=device,
        devices=nodes * per_node,
        per_node=per_node,
        link=_link(file.section("link"), "3.4 us"),
        # A single node needs no network.
        network=_link(file.section("network", {"bandwidth": "1 GB/s"} if nodes == 1 else None), "9.6 us"),
        efficiency=_efficiency(file.section("efficiency", {}), usual),
        nvlink_domain=None if domain == per_node else domain,
        measured=_measured(file.section("measured", {})),
        host=_host(file.section("host", {}), host_from_data_sheet(device.name)),
    )
    file.end()
    return cluster


def _device(file: _Section) -> Device:
    given = file.take("device")
    if isinstance(given, str):
        return device_from_data_sheet(data_sheet(given, where="device"))
    if not isinstance(given, dict):
        raise InputError(f"device: {given!r} is neither the name of a GPU nor a mapping")
    fields = _Section(given, "device.")
    precision = fields.take("precision")
    if precision not in ("bf16", "fp16", "fp32"):
        raise InputError(f"device.precision: {precision!r} is not one of bf16, fp16, fp32")
    device = Device(
        name=str(fields.take("name")),
        precision=precision,
        peak=fields.quantity("peak", "arithmetic"),
        sms=fields.whole("sms", 1),
        memory=fields.quantity("memory", "memory"),
        bandwidth=fields.quantity("bandwidth", "speed"),
        fp8=fields.quantity("fp8", "arithmetic") if "fp8" in given else None,
    )
    fields.end()
    return device


def _link(fields: _Section, latency: str) -> Link:
    link = Link(fields.quantity("bandwidth", "speed"), fields.quantity("latency", "time", latency))
    fields.end()
    return link


def _measured(fields: _Section) -> Measured:
    """Bandwidth and latency of single collectives."""
    names = [field.name for field in dataclasses.fields(Measured)]
    links = {name: _link(fields.section(name), "3.4 us") for name in names if name in fields.values}
    fields.known += names
    fields.end()
    return Measured(**links)


def _host(fields: _Section, default: Host) -> Host:
    """A device's share of its host, by default that of the device's standard node."""
    kinds = {"bandwidth": "speed", "memory": "memory", "memory-bandwidth": "speed"}
    given = {
        name.replace("-", "_"): fields.quantity(name, kind)
        for name, kind in kinds.items()
        if name in fields.values
    }
    fields.known += kinds
    fields.end()
    return dataclasses.replace(default, **given)


def _efficiency(fields: _Section, default: Efficiency) -> Efficiency:
    """Shares of the peaks, by default those of `default`; `network` by default the given `link`."""
    shares = {name: fields.share(name, getattr(default, name)) for name in SHARES if name != "network"}
    network = fields.share("network", shares["link"] if "link" in fields.values else default.network)
    ratios = {name: fields.positive(name, getattr(default, name)) for name in RATIOS}
    launch = fields.quantity("launch", "time", f"{1e6 * default.launch:g} us")
    fields.end()
    return Efficiency(**shares, **ratios, network=network, launch=launch)


def describe(cluster: Cluster) -> str:
    """Return the YAML from which `read_cluster` makes this cluster, with four digits."""
    device, efficiency = cluster.device, cluster.efficiency
    measured = {name: _link_values(link) for name, link in vars(cluster.measured).items() if link is not None}
    values = {
        "device": {
            "name": device.name,
            "precision": device.precision,
            "peak": f"{device.peak / 1e9:.4g} GFLOP/s",
            "sms": device.sms,
            "memory": f"{device.memory / 1e9:.4g} GB",
            "bandwidth": f"{device.bandwidth / 1e9:.4g} GB/s",
            **({"fp8": f"{device.fp8 / 1e9:.4g} GFLOP/s"} if device.fp8 else {}),
        },
        "devices-per-node": cluster.per_node,
        "nodes": cluster.nodes,
        **({"nvlink-domain": cluster.nvlink_domain} if cluster.nvlink_domain else {}),
        "link": _link_values(cluster.link),
        "network": _link_values(cluster.network),
        **({"measured": measured} if measured else {}),
        "host": _host_values(cluster.host),
        "efficiency": {
            **{name: float(f"{getattr(efficiency, name):.4g}") for name in (*SHARES, *RATIOS)},
            "launch": f"{1e6 * efficiency.launch:.4g} us",
        },
    }
    return yaml.safe_dump(values, sort_keys=False)


def _link_values(link: Link) -> dict[str, str]:
    return {"bandwidth": f"{link.bandwidth / 1e6:.4g} MB/s", "latency": f"{1e6 * link.latency:.4g} us"}


def _host_values(host: Host) -> dict[str, str]:
    values = {"bandwidth": f"{host.bandwidth / 1e6:.4g} MB/s"}
    if host.memory is not None:
        values["memory"] = f"{host.memory / 1e9:.4g} GB"
    if host.memory_bandwidth is not None:
        values["memory-bandwidth"] = f"{host.memory_bandwidth / 1e6:.4g} MB/s"
    return values
