"""Add the results of one part of gpu.sh to the results file of a device, or print that file.

python benchmarks/gpu_table.py RESULTS [PART FILE]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

# MFU on an H100 in bf16, by the part; and our tokens/s over nanoGPT's.
MFU_GOALS = {"355m": 0.45, "1.3b": 0.52, "7b": 0.57}
SPEED_GOAL = 1.1
PEER = "nanoGPT, compiled"
# Our tokens/s with FP8 over those in bf16.
FP8, FP8_GOALS = "ours, FP8", {"7b": 1.25}


def main() -> None:
    output, *part = sys.argv[1:]
    path = Path(output)
    results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if part:
        name, found = part[0], Path(part[1])
        results[name] = (
            read_test_report(found) if name == "tests" else json.loads(found.read_text(encoding="utf-8"))
        )
        path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    else:
        for name, found in results.items():
            print_part(name, found)


def read_test_report(report: Path) -> dict[str, float]:
    """Read the counts and duration from a report of pytest's --junitxml."""
    suite = next(ElementTree.parse(report).iter("testsuite"))
    counts = {name: int(suite.get(name)) for name in ("tests", "failures", "errors", "skipped")}
    return counts | {"seconds": float(suite.get("time"))}


def print_part(name: str, found: dict[str, Any]) -> None:
    """Print one line for the tests, or one per implementation or run that was compared."""
    if name == "tests":
        print("tests: " + ", ".join(f"{key} {value:g}" for key, value in found.items()))
        return
    print(f"{found['command']} (commit {found['commit']})")
    for title, sides in found.items():
        if title == "runs" or title.startswith(f"{name}, "):
            print(title)
            for side, values in sides.items():
                print(f"  {side:24} " + "  ".join(f"{key} {value:,}" for key, value in values.items()))
            for verdict in verdicts(name, sides):
                print(f"  {verdict}")


def verdicts(name: str, sides: dict[str, dict[str, float]]) -> list[str]:
    """Return one line per goal of a part: the measured value, the goal, and met, missed or not measured."""
    if name not in MFU_GOALS:
        return []
    goals = (
        ("MFU", sides.get("ours", {}).get("MFU"), MFU_GOALS[name]),
        (f"speed over {PEER}", sides.get(PEER, {}).get("ours over it"), SPEED_GOAL),
    )
    if name in FP8_GOALS:
        bf16, fp8 = (sides.get(side, {}).get("tokens/s") for side in ("ours", FP8))
        speed = None if bf16 is None or fp8 is None else round(fp8 / bf16, 3)
        goals += (("speed of FP8 over bf16", speed, FP8_GOALS[name]),)
    return [
        f"goal {goal} for {title}: "
        + ("not measured" if value is None else f"{value}, {'met' if value >= goal else 'missed'}")
        for title, value, goal in goals
    ]


if __name__ == "__main__":
    main()
