"""The record of a run that a report shows: metrics, evaluations, samples, checkpoints, and the flags of each start."""

from __future__ import annotations

import bisect
import dataclasses
import json
import logging
import shutil
from pathlib import Path
from typing import Any

from megatron.errors import InputError
from megatron.files import read_file

logger = logging.getLogger("megatron")

METRICS = "metrics.jsonl"  # in the folder of --save, unless --metrics-path names another file
# End of the name of the file beside it, with a line for each start of the run, each checkpoint, and values by rank.
EVENTS = ".events.jsonl"
MAX_BYTES = 1 << 32  # of a file of metrics
DATA_PHASE = "data phase"  # name of the number of the phase of the training data
EXPERTS = "moe "  # begins the names of values of mixtures of experts

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Metrics and flags of a run.

    Attributes:
        name: the run's folder or file, as the user named it.
        training: a row per log line, by iteration. To the metrics it adds "hours" of training so far, without
            evaluations and saving, and "tokens" in units of a million, if the sequence length is known.
        evaluations: a row per evaluation, likewise.
        samples: "iteration" and "text" of sample texts, a text by tag.
        starts: "iteration", "time" (seconds since 1970) and "config" of each start.
        checkpoints: "iteration" of each.
        by_rank: the newest values by rank, by name of a quantity and name of a part, such as a phase.
    """

    name: str
    training: list[Row]
    evaluations: list[Row]
    samples: list[Row]
    starts: list[Row]
    checkpoints: list[Row]
    by_rank: dict[str, dict[str, dict[str, float]]]

    @property
    def flags(self) -> dict[str, Any]:
        """Flags of the newest start, by field."""
        config = self.starts[-1]["config"] if self.starts else {}
        sections = [*(v for k, v in config.items() if k != "plugins"), *config.get("plugins", {}).values()]
        return {
            name: value
            for section in sections
            if isinstance(section, dict)
            for name, value in section.items()
        }


def read_record(path: Path) -> RunRecord:
    """Read the folder of --save, or a file of --metrics-path.

    Raises:
        InputError: there is no such file, or it is no file of metrics.
    """
    file = path / METRICS if path.is_dir() else path
    if not file.is_file():
        raise InputError(
            f"{path}: holds no {METRICS}; name the folder of --save of a run, or its --metrics-path"
            if path.is_dir()
            else f"{path}: no such file"
        )
    of_events = events_file(file)
    try:
        rows, events = read_rows(file), read_rows(of_events) if of_events.is_file() else []
    except OSError as error:
        raise InputError(f"{error.filename}: {error.strerror}") from None
    record = RunRecord(
        name=str(path),
        training=[row for row in rows if "learning rate" in row],
        evaluations=[row for row in rows if is_evaluation(row)],
        samples=[row for row in rows if "text" in row],
        starts=[row for row in events if "config" in row],
        checkpoints=[row for row in events if "checkpoint" in row],
        by_rank={name: parts for row in events for name, parts in row.get("by rank", {}).items()},
    )
    _add_time(record)
    return record


def events_file(metrics: Path) -> Path:
    """The file of a run's events beside its file of metrics."""
    return metrics.with_name(metrics.name.removesuffix(".jsonl") + EVENTS)


def read_rows(file: Path) -> list[Row]:
    """Read a file of JSON objects that name an iteration, without a last line that a killed run left half written."""
    rows: list[Row] = []
    lines = read_file(file, MAX_BYTES).decode("utf-8", errors="replace").splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        if not line.endswith("\n"):
            break
        row = _row(line)
        if row is None:
            raise InputError(
                f"{file}:{number} is not a JSON object with an iteration; name a file that a run wrote"
            )
        rows.append(row)
    return rows


def readable_lines(file: Path) -> list[tuple[str, Row]]:
    """The lines of such a file, if it exists, and their objects. Damaged lines are left out, with a warning and a copy
    of the file beside it.

    Raises:
        InputError: no line is such an object, so that the file is something else.
    """
    text = read_file(file, MAX_BYTES).decode("utf-8", errors="replace") if file.exists() else ""
    # A killed run may have left half a line.
    lines = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
    found = [(line, row) for line in lines if (row := _row(line)) is not None]
    if lines and not found:
        raise InputError(f"--metrics-path: {file} is not a file of metrics; choose another file")
    if len(found) < len(lines):
        copy = file.with_name(f"{file.name}.damaged")
        shutil.copyfile(file, copy)
        logger.warning(
            "%s: %d of %d lines are damaged and left out; a copy of the file is %s",
            file,
            len(lines) - len(found),
            len(lines),
            copy,
        )
    return found


def _row(line: str) -> Row | None:
    try:
        row = json.loads(line)
        int(row["iteration"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return row


def is_evaluation(row: Row) -> bool:
    """True for the values of an evaluation, which has neither a learning rate nor a sample."""
    return not row.keys() & {"learning rate", "text"}


def _add_time(record: RunRecord) -> None:
    length = record.flags.get("seq_length")
    seconds, before, hours_at = 0.0, 0, {}
    for row in record.training:
        iteration = row["iteration"]
        seconds += (row.get("seconds per iteration") or 0.0) * max(0, iteration - before)
        before = iteration
        hours_at[iteration] = row["hours"] = seconds / 3600
    iterations, hours = list(hours_at), list(hours_at.values())
    for row in record.evaluations:
        reached = bisect.bisect_right(iterations, row["iteration"])
        row["hours"] = hours[reached - 1] if reached else 0.0
    for row in (*record.training, *record.evaluations):
        if length is not None:
            row["tokens"] = row.get("consumed samples", 0) * length / 1e6
