"""Compare the planner's predictions with published measurements.

    python benchmarks/planner.py                                  # writes the papers' tables and plots into docs
    python benchmarks/planner.py --rows FILE [FILE ...] [--limit 8] [--fit]

`--rows` takes files like those in benchmarks/published, prints each row with its error, and ends with a line of the
means. The predictions are deterministic and do not depend on the machine.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from planner_fits import print_fits
from predict_row import predict
from published_rows import Row, read_rows

from megatron.cli import Parser, add_flags, make_config, run_command
from megatron.errors import InputError
from megatron.flags import Config, flag
from megatron.model.config import ModelConfig
from megatron.planner.cluster import DATA_SHEET_EFFICIENCY, Efficiency, cluster_from_data_sheet
from megatron.planner.device_specs import data_sheet
from megatron.planner.layout import Job, Layout
from megatron.planner.models import A100_MODELS, V100_MODELS, VOCAB_SIZE, Published
from megatron.planner.profiles import expected_error
from megatron.planner.programs import NVIDIA_2019, NVIDIA_2021, Program
from megatron.planner.simulate import Simulator

BEGIN, END = "<!-- made by python benchmarks/planner.py -->\n", "<!-- end -->\n"
PAGE = "docs/scaling.md"
A100, V100 = "a100-80gb", "v100-32gb-dgx2h"
# Rows of table 1 that --fit uses, and the fields of `Efficiency` that it fits.
ROWS, FITTED = ("1.7b", "18.4b", "1t"), ("matmul", "memory", "link")
# Weak scaling in percent, from 1909.08053 figure 5: one model replica, and 64 replicas.
WEAK_SCALING = {"1.2b": (100, 96), "2.5b": (95, 83), "4.2b": (82, 79), "8.3b": (77, 74)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkConfig(Config):
    """Options of the benchmark."""

    fit: bool = flag(
        False, "refit the constants and print them; writes nothing. With --rows, those of the profiles"
    )
    check: bool = flag(False, "fail if the table or a plot is out of date; writes nothing")
    rows: tuple[str, ...] | None = flag(
        None, "files of published runs to compare with; writes nothing", nargs="+", metavar="FILE"
    )
    limit: float | None = flag(
        None, "with --rows, exit with 1 if the mean error in percent is above this", low=0
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    add_flags(parser, BenchmarkConfig, "benchmark")
    config = make_config(BenchmarkConfig, vars(parser.parse_args(argv)))
    if config.rows is not None:
        rows = [row for path in config.rows for row in read_rows(Path(path))]
        if config.fit:
            print_fits([row for row in rows if isinstance(row, Row)])
        elif compare(rows) > (math.inf if config.limit is None else config.limit / 100):
            sys.exit(1)
        return
    if config.fit:
        print(fit())
        return
    page = ROOT / PAGE
    text = page.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    files = {page: before + BEGIN + tables() + END + rest.split(END)[1]}
    files |= {ROOT / "docs/figures" / name: picture for name, picture in plots().items()}
    for path, made in files.items():
        if config.check and (not path.exists() or path.read_text(encoding="utf-8") != made):
            raise InputError(f"{path.relative_to(ROOT)} is not up to date; run python benchmarks/planner.py")
        if not config.check:
            path.write_text(made, encoding="utf-8")


def compare(rows: Sequence[Row | str]) -> float:
    """Print each row and the means by group and over all. Returns the mean absolute error."""
    groups: dict[str, list[tuple[bool, float]]] = {}
    verdicts, expressed = [], 0
    for row in rows:
        if isinstance(row, str):
            print(f"not expressed: {row}")
            continue
        try:
            layout, seconds, fits = predict(row)
        except InputError as error:
            print(f"not expressed: {row.name}: {error}")
            continue
        expressed += 1
        verdicts.append(fits == (row.seconds is not None))
        verdict = "" if verdicts[-1] else (", predicted not to fit" if row.seconds else ", predicted to fit")
        if row.seconds is None:
            print(f"{row.name}: out of memory{verdict} | {row.group} | {layout}")
            continue
        error = seconds / row.seconds - 1
        groups.setdefault(row.group, []).append((row.fitted, error))
        band = expected_error(row.cluster.device.name, mixture=row.job.model.num_experts is not None)
        print(
            f"{row.name}: {row.seconds:.3g} s, predicted {seconds:.3g} s +- {band:.0%}, error {error:+.1%}"
            f"{' (fitted)' * row.fitted}{verdict} | {row.group}{'' if row.exact else ', inexact'} | {layout}"
        )
    print("\ngroup: rows, mean absolute error, that of rows not fitted, mean error")
    for name, errors in sorted(groups.items()):
        unseen = [abs(error) for fitted, error in errors if not fitted]
        print(
            f"{name}: {len(errors)}, {mean([abs(error) for _, error in errors])}, {mean(unseen)}, "
            f"{statistics.mean(error for _, error in errors):+.1%}"
        )
    every = [(name, fitted, abs(error)) for name, errors in groups.items() for fitted, error in errors]
    parts = {
        "all": [error for _, _, error in every],
        "fitted": [error for _, fitted, error in every if fitted],
        "not fitted": [error for _, fitted, error in every if not fitted],
        "dense": [error for name, _, error in every if "mixtures" not in name],
        "mixtures": [error for name, _, error in every if "mixtures" in name],
    }
    means = ", ".join(f"{name} {mean(errors)} ({len(errors)} rows)" for name, errors in parts.items())
    right = f"; memory verdicts {statistics.mean(verdicts):.1%} right" if verdicts else ""
    print(f"\n{expressed} of {len(rows)} rows expressed; mean absolute error: {means}{right}")
    return statistics.mean(parts["all"]) if every else math.inf


def mean(errors: Sequence[float]) -> str:
    """Format a mean; "-" without errors."""
    return f"{statistics.mean(errors):.1%}" if errors else "-"


def tflops(
    job: Job,
    layout: Layout,
    gpu: str = A100,
    program: Program = NVIDIA_2021,
    efficiency: Efficiency = DATA_SHEET_EFFICIENCY,
) -> float:
    """Predict TFLOP/s per GPU, counting full recomputation as the papers do."""
    cluster = dataclasses.replace(
        cluster_from_data_sheet(data_sheet(gpu, where="gpu"), layout.processes), efficiency=efficiency
    )
    step = Simulator(job, layout, cluster, program).step()
    return job.flops(recompute="full") / step.seconds / layout.processes / 1e12


def fit() -> Efficiency:
    """Fit the constants to the three rows with Gauss-Newton."""
    models = [A100_MODELS[name] for name in ROWS]

    def errors(efficiency: Efficiency) -> np.ndarray:
        return np.array([tflops(m.job(), m.layout(), efficiency=efficiency) / m.tflops - 1 for m in models])

    efficiency = dataclasses.replace(DATA_SHEET_EFFICIENCY, matmul=0.8, memory=0.8, stream=0.8, link=0.8)
    for _ in range(8):
        now, slopes = errors(efficiency), []
        for name in FITTED:
            nearby = dataclasses.replace(efficiency, **{name: 1.01 * getattr(efficiency, name)})
            nearby = dataclasses.replace(nearby, stream=nearby.memory)
            slopes.append((errors(nearby) - now) / 0.01)
        change = np.linalg.lstsq(np.stack(slopes, axis=1), -now, rcond=None)[0].clip(-0.2, 0.2)
        better = {
            name: getattr(efficiency, name) * (1 + c) for name, c in zip(FITTED, change.tolist(), strict=True)
        }
        efficiency = dataclasses.replace(efficiency, stream=better["memory"], **better)
    return efficiency


def tables() -> str:
    """Format the tables of docs/scaling.md."""
    rows = [
        "| model | layout | GPUs | published | predicted | error |",
        "|---|---|---|---|---|---|",
    ]
    errors = []
    for name, model in A100_MODELS.items():
        predicted = tflops(model.job(), model.layout())
        error = predicted / model.tflops - 1
        errors += [abs(error)] if name != "175b" else []
        layout = model.layout()
        shape = f"T{layout.tensor} P{layout.pipeline} D{layout.data}" + (
            f" V{layout.chunks}" if layout.chunks > 1 else ""
        )
        mark = " (fitted)" if name in ROWS else ""
        rows.append(
            f"| {name}{mark} | {shape}, microbatch {model.micro_batch_size} | {model.gpus:,} | {model.tflops:g} | "
            f"{predicted:.1f} | {round(error, 3) + 0:+.1%} |"  # + 0: no -0.0%
        )
    summary = (
        "\nTFLOP/s per GPU, including recomputation. Over the ten rows of table 1 of arXiv 2104.04473 (175b is from "
        f"section 5.1) the mean absolute error is {sum(errors) / len(errors):.1%} and the largest "
        f"{max(errors):.1%}.\n\n"
    )
    weak = [
        "| model | GPUs | published | predicted | with 64 replicas: published | predicted |",
        "|---|---|---|---|---|---|",
    ]
    for (name, (alone, replicas)), (one, many) in zip(WEAK_SCALING.items(), weak_scaling(), strict=True):
        weak.append(
            f"| {name} | {V100_MODELS[name].tensor} | {alone}% | {one:.0%} | {replicas}% | {many:.0%} |"
        )
    base = tflops(*single_replica(V100_MODELS["1.2b"]), V100, NVIDIA_2019)
    note = f"\nWeak scaling of arXiv 1909.08053 on V100. One GPU reaches 39 TFLOP/s; predicted: {base:.1f}.\n"
    return "\n".join(rows) + "\n" + summary + "\n".join(weak) + "\n" + note


def single_replica(model: Published) -> tuple[Job, Layout]:
    """Return job and layout of one replica of a model, with its share of the batch."""
    job, layout = model.job(), model.layout()
    return (
        dataclasses.replace(job, global_batch_size=job.global_batch_size // layout.data),
        dataclasses.replace(layout, data=1),
    )


def weak_scaling() -> list[tuple[float, float]]:
    """Scaling efficiency of each model of 1909.08053 relative to the first on one GPU: one replica, and 64 replicas."""
    models = [V100_MODELS[name] for name in WEAK_SCALING]
    base = tflops(*single_replica(models[0]), V100, NVIDIA_2019)
    return [
        (
            tflops(*single_replica(model), V100, NVIDIA_2019) / base,
            tflops(model.job(), model.layout(), V100, NVIDIA_2019) / base,
        )
        for model in models
    ]


def gpt(layers: int, hidden: int, heads: int, batch: int) -> Job:
    """Return the job of a GPT in the figures of 2104.04473."""
    model = ModelConfig(
        num_layers=layers, hidden_size=hidden, num_attention_heads=heads, max_position_embeddings=2048
    )
    return Job(model, 2048, VOCAB_SIZE, batch)


# A line of a plot: its name, and y for each x; None for no point.
Line = tuple[str, list[float | None]]


def plots() -> dict[str, str]:
    """Draw table 1 and the predictions for the figures of section 5. Returns SVG by file name."""
    table = {name: model for name, model in A100_MODELS.items() if name != "175b"}
    points = [model.tflops for model in table.values()]
    predicted = [tflops(model.job(), model.layout()) for model in table.values()]
    layouts = (Layout(tensor=64 // p, pipeline=p, recompute="full") for p in (2, 4, 8, 16, 32))
    pictures = {
        "planner-table-1.svg": plot(
            "2104.04473 table 1: TFLOP/s of a GPU", list(table), [("predicted", predicted)], points
        ),
        "planner-figure-12.svg": plot(
            "Figure 12: interleaving, 175B on 96 GPUs, by batch size",
            [12, 24, 36, 48, 60],
            by_batch((12, 24, 36, 48, 60), lambda b: gpt(96, 12288, 96, b), {
                "interleaved": Layout(tensor=8, pipeline=12, chunks=4, recompute="full"),
                "1F1B": Layout(tensor=8, pipeline=12, recompute="full"),
            }),
        ),
        "planner-figure-13.svg": plot(
            "Figure 13: (pipeline, tensor), 162B on 64 GPUs",
            [f"({p}, {64 // p})" for p in (2, 4, 8, 16, 32)],
            by_layout((32, 128), lambda b: gpt(32, 20480, 128, b), list(layouts)),
        ),
        "planner-figure-14.svg": plot(
            "Figure 14: (pipeline, data), 5.9B on 64 GPUs",
            [f"({p}, {64 // p})" for p in (2, 4, 8, 16, 32)],
            by_layout((32, 128, 512), lambda b: gpt(32, 3840, 32, b), [
                Layout(pipeline=p, data=64 // p, recompute="full") for p in (2, 4, 8, 16, 32)
            ]),
        ),
        "planner-figure-15.svg": plot(
            "Figure 15: (tensor, data), 5.9B on 64 GPUs",
            [f"({t}, {64 // t})" for t in (2, 4, 8, 16, 32)],
            by_layout((32, 128, 512), lambda b: gpt(32, 3840, 32, b), [
                Layout(tensor=t, data=64 // t, recompute="full") for t in (2, 4, 8, 16, 32)
            ]),
        ),
        "planner-figure-16.svg": plot(
            "Figure 16: microbatch size, 91B, T8 P8",
            [1, 2, 4, 8],
            by_layout((128, 512), lambda b: gpt(32, 15360, 128, b), [
                Layout(tensor=8, pipeline=8, micro_batch_size=n, recompute="full") for n in (1, 2, 4, 8)
            ]),
        ),
    }  # fmt: skip
    return pictures


def by_layout(batches: Sequence[int], job: Callable[[int], Job], layouts: Sequence[Layout]) -> list[Line]:
    """Return one line per batch size, with one point per layout."""
    return [(f"batch {n}", [tflops(job(n), layout) for layout in layouts]) for n in batches]


def by_batch(batches: Sequence[int], job: Callable[[int], Job], layouts: dict[str, Layout]) -> list[Line]:
    """Return one line per layout, with one point per batch size."""
    return [(name, [tflops(job(n), layout) for n in batches]) for name, layout in layouts.items()]


TEXT_COLOR, BACKGROUND, GRID_COLOR = "#1f2937", "#f8fafc", "#e5e7eb"
COLORS = ("#2f6fb7", "#2e8b57", "#b7652f")


def plot(
    title: str, xs: Sequence[object], lines: Sequence[Line], published: Sequence[float] | None = None
) -> str:
    """Draw lines over equally spaced x as SVG, and `published` as rings. Values are TFLOP/s per GPU, from 0 to 200."""
    width, height, left, top, top_value = 560, 300, 46, 40, 200
    bottom = height - 40

    def position(i: int, value: float) -> tuple[float, float]:
        return left + 30 + i * (width - left - 60) / (len(xs) - 1), bottom - value / top_value * (
            bottom - top
        )

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="Helvetica, Arial, sans-serif" font-size="12" fill="{TEXT_COLOR}" role="img">',
        f"<title>{title}</title>",
        f'<rect width="{width}" height="{height}" rx="8" fill="{BACKGROUND}"/>',
        f'<text x="16" y="24" font-size="15">{title}</text>',
    ]
    for value in range(0, top_value + 1, 50):
        y = position(0, value)[1]
        parts.append(f'<line x1="{left}" y1="{y:g}" x2="{width - 16}" y2="{y:g}" stroke="{GRID_COLOR}"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:g}" text-anchor="end">{value}</text>')
    for i, x in enumerate(xs):
        parts.append(f'<text x="{position(i, 0)[0]:.1f}" y="{bottom + 18}" text-anchor="middle">{x}</text>')
    for number, ((name, values), color) in enumerate(zip(lines, COLORS, strict=False)):
        points = " ".join("{:.1f},{:.1f}".format(*position(i, v)) for i, v in enumerate(values))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts.append(f'<text x="{left + 20 + 130 * number}" y="{height - 6}" fill="{color}">{name}</text>')
    for i, value in enumerate(published or ()):
        x, y = position(i, value)
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="none" stroke="{TEXT_COLOR}" stroke-width="1.5"/>'
        )
    if published:
        parts.append(f'<text x="{left + 150}" y="{height - 6}">o published</text>')
    return "\n".join([*parts, "</svg>\n"])


if __name__ == "__main__":
    run_command(main)
