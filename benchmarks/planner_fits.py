"""Fit the constants of the planner's profiles to published runs: `benchmarks/planner.py --rows FILE... --fit`."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

import numpy as np
from predict_row import predict
from published_rows import Row

from megatron.planner.cluster import Efficiency
from megatron.planner.profiles import CONSTANTS, START, Constants

# Constants that --fit fits to a profile's rows: by default these, else by program and generation.
CONSTANTS_FITTED = {
    ("megatron-core", "H100"): ("matmul", "memory", "link", "fp8", "expert"),
    ("megatron-core", "B200"): ("matmul", "link"),
    ("megatron-core", "B300"): ("matmul", "link"),
    ("nemo-2025", "B200"): ("matmul", "link", "fp8"),
    ("megatron-deepspeed", "V100"): ("matmul", "memory", "link", "network"),
    ("megatron-deepspeed-fp16", "A100"): ("network",),
    ("llm-foundry", "A100"): ("matmul", "memory"),
    ("llm-foundry", "H100"): ("matmul", "memory"),
    ("torchtitan", "H100"): ("matmul", "memory"),
    ("gpt-oss-2025", "B200"): ("expert",),
    ("gpt-oss-2025", "B300"): ("expert",),
}
# Relative error of a row that weighs as much as a change of a constant by PRIOR from where the fit starts.
ROW_ERROR, PRIOR, FIT_STEPS = 0.02, 0.15, 12


def print_fits(rows: Sequence[Row]) -> None:
    """Fit the constants of each profile to its rows and print them, and errors with a family of models left out.

    There are about as many rows as constants, so each of several constants is also held near its start.
    """
    by_name = {row.name: row for row in rows}
    for key, names in CONSTANTS_FITTED.items():
        constants = CONSTANTS[key]
        fitted = [by_name[name] for name in constants.fitted if name in by_name]
        if len(fitted) < len(constants.fitted):
            print(f"{key}: needs the rows {', '.join(constants.fitted)}")
            continue
        start = starting_point(constants, names)
        values = fit_rows(fitted, start, names)
        print(f"{key}: " + ", ".join(f"{name}={value:.3f}" for name, value in values.items()))
        families = {row.family for row in fitted}
        for family in sorted(families) if len(families) > 1 else []:
            others = [row for row in fitted if row.family != family]
            found = fit_rows(others, start, names)
            without = dataclasses.replace(start, **found, stream=found.get("memory", start.stream))
            unseen = [
                row
                for row in rows
                if row.family == family and row.seconds and row.profile.constants is constants
            ]
            errors = [mean_error(unseen, efficiency) for efficiency in (without, constants.efficiency)]
            print(
                f"  without {family}: {errors[0]:.1%} over its {len(unseen)} rows in place of {errors[1]:.1%}"
            )


def mean_error(rows: Sequence[Row], efficiency: Efficiency) -> float:
    """Mean absolute error of the time of runs with given constants."""
    return statistics.mean(
        abs(predict(with_efficiency(row, efficiency))[1] / (row.seconds or 1) - 1) for row in rows
    )


def starting_point(constants: Constants, names: Sequence[str]) -> Efficiency:
    """The constants with those that are fitted where their fit starts."""
    changed = {name: getattr(START, name) for name in (*names, *(["stream"] * ("memory" in names)))}
    return dataclasses.replace(constants.efficiency, **changed)


def fit_rows(rows: Sequence[Row], start: Efficiency, names: Sequence[str]) -> dict[str, float]:
    """Fit the logarithms of constants with Gauss-Newton. A row's layout is the one that the start predicts."""
    chosen = [dataclasses.replace(row, layouts=(predict(with_efficiency(row, start))[0],)) for row in rows]

    def errors(logs: np.ndarray) -> np.ndarray:
        efficiency = moved(start, names, logs)
        return np.array(
            [math.log(predict(with_efficiency(r, efficiency))[1] / (r.seconds or 1)) for r in chosen]
        )

    logs = np.zeros(len(names))
    for _ in range(FIT_STEPS):
        now = errors(logs)
        slopes = np.stack([(errors(logs + step) - now) / 0.01 for step in 0.01 * np.eye(len(names))], axis=1)
        prior = PRIOR if len(names) > 1 else math.inf
        system = np.concatenate([slopes / ROW_ERROR, np.eye(len(names)) / prior])
        target = -np.concatenate([now / ROW_ERROR, logs / prior])
        logs += np.linalg.lstsq(system, target, rcond=None)[0].clip(-0.2, 0.2)
        logs = np.minimum(logs, [0.3 if name == "fp8" else -math.log(getattr(start, name)) for name in names])
    efficiency = moved(start, names, logs)
    return {name: getattr(efficiency, name) for name in names}


def moved(start: Efficiency, names: Sequence[str], logs: np.ndarray) -> Efficiency:
    """Constants multiplied by the exponentials of `logs`."""
    values = {name: getattr(start, name) * math.exp(log) for name, log in zip(names, logs, strict=True)}
    if "memory" in values:
        values["stream"] = values["memory"]
    return dataclasses.replace(start, **values)


def with_efficiency(row: Row, efficiency: Efficiency) -> Row:
    """The row on a cluster with other constants."""
    return dataclasses.replace(row, cluster=dataclasses.replace(row.cluster, efficiency=efficiency))
