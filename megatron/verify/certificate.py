"""The certificate of a verification: a JSON file and an HTML page."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import platform
from collections.abc import Sequence
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


def _summary(checks: Sequence[Check]) -> str:
    rows = "".join(
        f"<tr><td>{escape(check.name)}</td><td>{check.processes}</td><td>{check.compared:,}</td>"
        f"<td>{_ratio(check.largest)}</td><td>{_verdict(check)}</td></tr>"
        for check in checks
    )
    heads = "".join(
        f"<th>{head}</th>"
        for head in ("run", "processes", "comparisons", "largest difference / bound", "result")
    )
    return f"<table><tr>{heads}</tr>{rows}</table>"


def _ratio(value: float | None) -> str:
    return "infinite" if value is None or not math.isfinite(value) else f"{value:.3g}"


def _verdict(check: Check) -> str:
    if check.not_covered:
        return "not covered"
    return f'<span class="{"passed" if check.passed else "failed"}">{"passed" if check.passed else "FAILED"}</span>'


def _section(check: Check) -> str:
    if check.not_covered:
        return ""
    kinds = "".join(
        f"<tr><td>{kind}</td><td>{row['compared']:,}</td><td>{row['failed']:,}</td><td>{_ratio(row['largest'])}</td>"
        f"<td>{escape(row['at'])}</td></tr>"
        for kind, row in check.kinds.items()
    )
    heads = "".join(f"<th>{head}</th>" for head in ("kind", "comparisons", "failed", "largest", "at"))
    table = f"<table><tr>{heads}</tr>{kinds}</table>"
    finding = f'<p class="failed">First difference: {escape(str(check.finding))}</p>' if check.finding else ""
    error = f"<pre>{escape(check.error)}</pre>" if check.error else ""
    failures = "".join(
        f"<tr><td>{f['step']}</td><td>{f['kind']}</td><td>{escape(f['name'])}</td><td>{f['rank']}</td>"
        f"<td>{'' if f['sample'] is None else f['sample']}</td><td>{f['difference']:.3g}</td><td>{f['norm']:.3g}</td>"
        f"<td>{f['bound']:.3g}</td><td>{escape(f['fault'])}</td></tr>"
        for f in check.failures
    )
    columns = ("step", "kind", "name", "rank", "sample", "difference", "norm", "bound", "")
    listed = (
        f"<details open><summary>Failed comparisons, the first {len(check.failures)}</summary><table><tr>"
        + "".join(f"<th>{column}</th>" for column in columns)
        + f"</tr>{failures}</table></details>"
        if failures
        else ""
    )
    skipped = (
        _list([f"{reason}: {count:,}" for reason, count in check.skipped.items()]) if check.skipped else ""
    )
    note = f"<p>Not compared:</p>{skipped}" if skipped else ""
    return (
        f"<h2>{escape(check.name)}</h2>{finding}{error}{table}{listed}{note}"
        f"<details><summary>Flags</summary><pre>{escape(check.command)}</pre></details>"
    )
