"""The certificate of a verification: a JSON file and an HTML page."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import platform
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

import torch

from megatron import __version__
from megatron.verify.runner import Check

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem }
table { border-collapse: collapse; margin: .5rem 0 1.5rem }
td, th { border: 1px solid #8884; padding: .2rem .6rem; text-align: left; vertical-align: top }
code, pre { font: 13px/1.4 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere }
.passed { color: #087f5b } .failed { color: #c92a2a; font-weight: bold }
@media (prefers-color-scheme: dark) { body { background: #16181c; color: #ddd } }
"""


def certificate(
    command: str, changes: Sequence[str], checks: Sequence[Check], not_covered: Sequence[str], seconds: float
) -> dict[str, Any]:
    """The certificate as JSON values. Numbers that are not finite are null.

    It passes if all checks passed and the first, of the run's own layout, compared anything.
    """
    found = {
        "passed": all(check.passed for check in checks) and checks[0].compared > 0,
        "command": command,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
        "versions": {
            "megatron": __version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            "machine": platform.machine(),
        },
        "changes": list(changes),
        "compared": sum(check.compared for check in checks),
        "checks": [_check_json(check) for check in checks],
        "not_covered": [*not_covered, *(f"{c.name}: {c.not_covered}" for c in checks if c.not_covered)],
    }
    return _finite(found)


def _check_json(check: Check) -> dict[str, Any]:
    values = {f.name: getattr(check, f.name) for f in dataclasses.fields(check)}
    values["finding"] = None if check.finding is None else check.finding.to_json()
    return {**values, "passed": check.passed, "compared": check.compared, "largest": check.largest}


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(x) for key, x in value.items()}
    return [_finite(x) for x in value] if isinstance(value, list | tuple) else value


def to_json(found: dict[str, Any]) -> str:
    return json.dumps(found, indent=1) + "\n"


def to_html(found: dict[str, Any], checks: Sequence[Check]) -> str:
    """One self-contained page."""
    word = "passed" if found["passed"] else "failed"
    sections = "".join(_section(check) for check in checks)
    changes, missing = (_list(found[key]) for key in ("changes", "not_covered"))
    versions = ", ".join(f"{name} {value}" for name, value in found["versions"].items())
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Verification: {word}</title><style>{STYLE}</style></head><body>
<h1>Verification: <span class="{word}">{word}</span></h1>
<p>{found["compared"]:,} comparisons in {found["seconds"]:.0f} seconds, {found["date"]}; {escape(versions)}</p>
<p>Command:</p><pre>{escape(found["command"])}</pre>
{_summary(checks)}
{sections}
<h2>Shrunk</h2>{changes}
<h2>Not covered</h2>{missing}
</body></html>
"""


def _list(items: Sequence[str]) -> str:
    return (
        "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"
        if items
        else "<p>Nothing.</p>"
    )


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are HTML."""
    heads = "".join(f"<th>{column}</th>" for column in columns)
    lines = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{heads}</tr>{lines}</table>"


def _summary(checks: Sequence[Check]) -> str:
    columns = ("run", "processes", "comparisons", "largest difference / bound", "result")
    return _table(
        columns,
        (
            (escape(c.name), str(c.processes), f"{c.compared:,}", _number(c.largest), _verdict(c))
            for c in checks
        ),
    )


def _number(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "infinite"


def _verdict(check: Check) -> str:
    if check.not_covered:
        return "not covered"
    return f'<span class="{"passed" if check.passed else "failed"}">{"passed" if check.passed else "FAILED"}</span>'


def _section(check: Check) -> str:
    if check.not_covered:
        return ""
    finding = f'<p class="failed">First difference: {escape(str(check.finding))}</p>' if check.finding else ""
    error = f"<pre>{escape(check.error)}</pre>" if check.error else ""
    skipped = [f"{reason}: {count:,}" for reason, count in check.skipped.items()]
    note = f"<p>Not compared:</p>{_list(skipped)}" if skipped else ""
    return (
        f"<h2>{escape(check.name)}</h2>{finding}{error}{_kinds(check)}{_failures(check)}{note}"
        f"<details><summary>Flags</summary><pre>{escape(check.command)}</pre></details>"
    )


def _kinds(check: Check) -> str:
    """For each kind of record, the comparison with the largest difference over its bound."""
    columns = ("kind", "comparisons", "failed", "largest", "difference", "bound", "norm", "at")
    return _table(
        columns,
        (
            (
                kind,
                f"{row['compared']:,}",
                f"{row['failed']:,}",
                *(_number(row[column]) for column in ("largest", "difference", "bound", "norm")),
                escape(row["at"]),
            )
            for kind, row in check.kinds.items()
        ),
    )


def _failures(check: Check) -> str:
    if not check.failures:
        return ""
    columns = ("step", "kind", "name", "rank", "sample", "difference", "norm", "bound", "fault")
    rows = (
        (
            str(row["step"]),
            row["kind"],
            escape(row["name"]),
            str(row["rank"]),
            "" if row["sample"] is None else str(row["sample"]),
            *(_number(row[column]) for column in ("difference", "norm", "bound")),
            escape(row["fault"]),
        )
        for row in check.failures
    )
    summary = f"Failed comparisons, the first {len(check.failures)}"
    return f"<details open><summary>{summary}</summary>{_table(columns, rows)}</details>"
