"""The format of captures: a folder of safetensors and JSON files, described in docs/verify.md.

Reader and writer need no process group, so that any program can write a capture of what it computes.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron.errors import InputError
from megatron.files import read_file

FORMAT, VERSION = "megatron-capture", 1
MAX_JSON_BYTES = 1 << 28
# Kinds of records in the order in which a step computes them. "local gradient" is one rank's part before reduction.
KINDS = (
    "mask",
    "activation",
    "loss",
    "activation gradient",
    "local gradient",
    "gradient",
    "metric",
    "update",
    "weight",
    "state",
    "parameter",
    "logged",
)

Range = tuple[int, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """The place of a rank's tensor in a whole tensor.

    Attributes:
        shape: shape of the whole tensor.
        dim: dimension that is split.
        ranges: indices along `dim` that the local tensor holds, one range after the other.
        valid: rows of the whole tensor that are not padding; None for all.
        local_shape: shape of the local tensor, before `flat` is cut out of it.
        flat: elements of the flattened local tensor that the record holds; None for all.
    """

    shape: tuple[int, ...]
    dim: int
    ranges: tuple[Range, ...]
    local_shape: tuple[int, ...]
    valid: int | None = None
    flat: Range | None = None

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Place:
        ranges = tuple((int(begin), int(end)) for begin, end in value["ranges"])
        flat = value.get("flat")
        return cls(
            shape=tuple(value["shape"]),
            dim=int(value["dim"]),
            ranges=ranges,
            local_shape=tuple(value["local_shape"]),
            valid=value.get("valid"),
            flat=None if flat is None else (int(flat[0]), int(flat[1])),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """A tensor in a capture.

    Attributes:
        kind: one of `KINDS`.
        name: name in the whole model: of a module, a parameter or a value.
        step: step of the run, from 1; 0, or the step of the checkpoint, for the state before the first step.
        sample: index in the run of the first sample of the microbatch; None if the record belongs to the whole batch.
        index: number of the record among those of one module and microbatch.
        order: number of the record among those that the rank wrote for the microbatch, in the order of computation.
        place: None if the tensor is whole.
        sum_over: axes over which the records of ranks add up to the whole.
        read_by: modules that read an activation.
        partial: of a gradient, if the tensor is whole: ranks of the axis "tp" may each have a part of the sum.
        norm: L2 norm.
        key: name of the tensor in the rank's file; None if only the norm was written.
        rank: rank that wrote it.
        coordinates: of the rank, by the axes that divide the tensor; by default those of the writer.
    """

    kind: str
    name: str
    step: int
    sample: int | None = None
    index: int = 0
    order: int = 0
    place: Place | None = None
    sum_over: tuple[str, ...] = ()
    read_by: tuple[str, ...] = ()
    partial: bool = False
    norm: float = 0.0
    key: str | None = None
    rank: int = 0
    coordinates: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def id(self) -> tuple[int, str, str, int | None, int]:
        """Identifier that the records of all ranks of one tensor share."""
        return self.step, self.kind, self.name, self.sample, self.index


class CaptureWriter:
    """Writes the records of one rank: `add` tensors, then `flush` each step. Rank 0 also describes the run."""

    def __init__(
        self,
        folder: Path,
        *,
        rank: int = 0,
        coordinates: Mapping[str, int] | None = None,
        sizes: Mapping[str, int] | None = None,
        run: Mapping[str, Any] | None = None,
        max_bytes: int | None = None,
    ) -> None:
        """Start a capture.

        Args:
            coordinates, sizes: rank on each axis, and sizes of the axes, such as {"pp": 1, "dp": 2, "tp": 1}. Axes that
                only records name have a size but no coordinate.
            run: facts about the run, as JSON; "precision" is "fp32", "fp16" or "bf16".
            max_bytes: bytes of tensors that are written per step; None for no limit.
        """
        self.folder, self.rank, self.max_bytes = folder, rank, max_bytes
        self.coordinates, self.sizes = dict(coordinates or {}), dict(sizes or {})
        self.records: list[Record] = []
        self.tensors: dict[str, Tensor] = {}
        self.num_bytes = 0
        folder.mkdir(parents=True, exist_ok=True)
        if rank == 0:
            head = {"format": FORMAT, "version": VERSION, "sizes": self.sizes, "run": dict(run or {})}
            _write_json(folder / "run.json", head)

    def add(self, record: Record, values: Tensor) -> None:
        """Add a tensor, which is copied. Beyond `max_bytes` only its norm is kept."""
        values = values.detach()
        norm = float(torch.linalg.vector_norm(values.double()))
        key = None
        if self.max_bytes is None or self.num_bytes + values.nbytes <= self.max_bytes:
            key = f"{len(self.records):06d}"
            self.num_bytes += values.nbytes
            self.tensors[key] = values.cpu().clone().contiguous()
        coordinates = record.coordinates or self.coordinates
        self.records.append(
            dataclasses.replace(record, norm=norm, key=key, rank=self.rank, coordinates=coordinates)
        )

    def flush(self) -> None:
        """Write the records added since the last call, which are of one step or of the state before it."""
        if not self.records:
            return
        folder = self.folder / f"step_{self.records[0].step:07d}"
        folder.mkdir(exist_ok=True)
        path = folder / f"rank_{self.rank:05d}"
        save_file(self.tensors, path.with_suffix(".safetensors"))
        rows = [_record_to_json(record, self.coordinates) for record in self.records]
        head = {"format": FORMAT, "version": VERSION, "rank": self.rank, "coordinates": self.coordinates}
        _write_json(path.with_suffix(".json"), {**head, "records": rows})
        self.records, self.tensors, self.num_bytes = [], {}, 0


class Capture:
    """A capture on disk. Tensors are read on demand.

    Attributes:
        run, sizes: as given to the `CaptureWriter` of rank 0.
        num_ranks: number of ranks that the run had.
    """

    def __init__(self, folder: Path) -> None:
        """Read the lists of records.

        Raises:
            InputError: the folder holds no capture, or a damaged one.
        """
        self.folder = folder
        # Files stay open while they are read from.
        self._open = functools.lru_cache(maxsize=64)(functools.partial(safe_open, framework="pt"))
        head = _read_json(folder / "run.json")
        if head.get("format") != FORMAT or head.get("version") != VERSION:
            raise InputError(f"{folder}: is not a capture of version {VERSION}")
        self.run: dict[str, Any] = head.get("run", {})
        self.sizes: dict[str, int] = head.get("sizes", {})
        self.records: list[Record] = []
        self.files: dict[tuple[int, int], Path] = {}
        self.num_ranks = math.prod(self.sizes.values())
        for path in sorted(folder.glob("step_*/rank_*.json")):
            content = _read_json(path)
            try:
                rows = [_record_from_json(row, content) for row in content["records"]]
                axes = content["coordinates"] or self.sizes
                self.num_ranks = math.prod(self.sizes.get(axis, 1) for axis in axes)
            except (KeyError, TypeError, ValueError) as error:
                raise InputError(f"{path}: a record is wrong or incomplete ({error})") from None
            self.records += rows
            for row in rows:
                self.files[row.step, row.rank] = path.with_suffix(".safetensors")
        if not self.records:
            raise InputError(f"{folder}: holds no records")

    def check_ranks(self) -> None:
        """Raise `InputError` if a rank's records of a step are missing."""
        world = self.num_ranks
        for step in sorted({step for step, _ in self.files}):
            if missing := set(range(world)) - {rank for at, rank in self.files if at == step}:
                raise InputError(
                    f"{self.folder}: step {step} lacks rank {min(missing)} of {world}; put the files of all ranks into "
                    "one folder"
                )

    def read(self, record: Record) -> Tensor:
        """The tensor of a record, in its dtype.

        Raises:
            InputError: the record has no tensor, or its file is missing or damaged.
        """
        path = self.files[record.step, record.rank]
        if record.key is None:
            raise InputError(f"{path}: holds only the norm of {record.kind} {record.name}")
        try:
            return self._open(path).get_tensor(record.key)
        except (OSError, SafetensorError) as error:
            raise InputError(f"{path}: cannot be read ({' '.join(str(error).split())[:200]})") from None

    def by_id(self) -> dict[tuple, list[Record]]:
        """The records of each tensor of the whole model, by their `Record.id`."""
        found: dict[tuple, list[Record]] = {}
        for record in self.records:
            found.setdefault(record.id, []).append(record)
        return found


def _record_to_json(record: Record, coordinates: Mapping[str, int]) -> dict[str, Any]:
    left_out = {"rank", "place", *(() if record.coordinates != coordinates else ("coordinates",))}
    row = {k: v for k, v in dataclasses.asdict(record).items() if k not in left_out}
    return row | {"place": None if record.place is None else record.place.to_json()}


def _record_from_json(row: dict[str, Any], file: dict[str, Any]) -> Record:
    if row["kind"] not in KINDS:
        raise ValueError(f"kind {row['kind']!r} is not one of {', '.join(KINDS)}")
    names = {field.name for field in dataclasses.fields(Record)}
    values = {k: v for k, v in row.items() if k in names} | {
        "place": None if row.get("place") is None else Place.from_json(row["place"]),
        "rank": file["rank"],
        "coordinates": row.get("coordinates", file["coordinates"]),
    }
    for name in ("sum_over", "read_by"):
        values[name] = tuple(values.get(name, ()))
    return Record(**values)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value) + "\n", encoding="utf-8")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(read_file(path, MAX_JSON_BYTES))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise InputError(f"{path}: is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: is not a JSON object")
    return value
