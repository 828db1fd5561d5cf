"""One self-contained HTML page about one run or several: curves, samples, evaluations, and flags."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib.resources import files
from itertools import cycle, pairwise
from string import Template
from typing import TYPE_CHECKING, Any, Literal

from megatron import __version__
from megatron.errors import InputError
from megatron.reports.record import DATA_PHASE, EXPERTS, Row, RunRecord

if TYPE_CHECKING:
    from bokeh.plotting import figure as Figure

# Colors that are told apart with any color vision (Okabe and Ito), on white and on black.
COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
GRAY = "#808080"
POINTS = 1000  # most points of a curve
HEIGHT = 280  # of a figure with one row of labels, in pixels
LEGEND_WIDTH = 44  # characters of a legend's labels in a row, each with 5 for its mark
PROMPTS, TEXTS = 10, 12  # most prompts whose samples are shown, and most samples of each in a run
Scale = Literal["linear", "log"]
AXES = {"iteration": "iteration", "tokens": "million tokens", "hours": "hours of training"}


def report_page(runs: Sequence[RunRecord]) -> str:
    """Return the page.

    Raises:
        InputError: bokeh is not installed.
    """
    try:
        from bokeh.embed import components
        from bokeh.resources import Resources
    except ImportError:
        raise InputError("a report needs bokeh: pip install bokeh") from None
    axes = [
        axis for axis in AXES if all(axis in row for run in runs for row in (*run.training, *run.evaluations))
    ]
    figures = list(_figures(runs))
    script, divs = components([figure for _, figure in figures]) if figures else ("", ())
    plots = "".join(
        f"<section><h2>{escape(title)}</h2>{div}</section>"
        for (title, _), div in zip(figures, divs, strict=True)
    )
    buttons = "".join(
        f'<button data-field="{axis}" data-label="{AXES[axis]}">{AXES[axis]}</button>' for axis in axes
    )
    values = {
        "title": escape(", ".join(run.name for run in runs)),
        "resources": Resources(mode="inline", components=["bokeh"]).render_js(),
        "summary": _summary(runs),
        "buttons": buttons,
        "plots": plots or "<p>No iteration has been reported yet.</p>",
        "samples": _samples(runs),
        "evaluations": _evaluation_table(runs) + _one_rank_tables(runs),
        "flags": _flag_table(runs),
        "script": script,
        "version": __version__,
    }
    page = (files("megatron.reports") / "page.html").read_text(encoding="utf-8")
    return Template(page).substitute(values)


def _figures(runs: Sequence[RunRecord]) -> Iterator[tuple[str, Figure]]:
    """Yield each figure with its title."""
    names = list(dict.fromkeys(name for run in runs for row in run.training for name in row))
    losses = [name for name in names if name.endswith("loss") and not name.startswith(EXPERTS)]
    for loss in losses:
        figure = _new_figure(loss, scale="linear")
        for run, color in zip(runs, cycle(COLORS)):
            name = f"{run.name}: " if len(runs) > 1 else ""
            _curve(figure, run.training, loss, color, f"{name}training")
            _verticals(figure, _phase_starts(run), color, "dotdash", f"{name}data phase")
            for split, marker in (("validation", "circle"), ("test", "diamond")):
                _points(figure, run.evaluations, f"{loss} {split}", color, f"{name}{split}", marker)
        yield loss, _finish(figure)
    single: dict[str, Scale] = {
        "learning rate": "linear",
        "grad norm": "log",
        "tokens per second": "linear",
        "mfu": "linear",
        "global batch size": "linear",
        "loss scale": "log",
        "params norm": "linear",
    }
    for name, scale in single.items():
        values = {row[name] for run in runs for row in run.training if row.get(name) is not None}
        if not values or (name == "global batch size" and len(values) == 1):
            continue
        figure = _new_figure(name, scale="linear" if min(values) <= 0 else scale)
        for run, color in zip(runs, cycle(COLORS)):
            _curve(figure, run.training, name, color, run.name if len(runs) > 1 else name)
            if name == "grad norm":
                skipped = [row for row in run.training if row.get("skipped iterations")]
                _verticals(figure, skipped, color, "dotted", "skipped iterations")
            if name in ("tokens per second", "mfu"):
                _points(figure, _rows_at(run, run.evaluations, name), name, color, "evaluation", "triangle")
                _points(figure, _rows_at(run, run.checkpoints, name), name, color, "checkpoint", "square")
            _verticals(figure, _rows_at(run, run.starts[1:], "iteration"), GRAY, "dashed", "resumed")
        yield {"mfu": "MFU"}.get(name, name), _finish(figure)
    groups = {
        "memory of the rank with the most, bytes": [name for name in names if name.startswith("mem-")],
        "phases of the slowest rank, seconds per iteration": [n for n in names if n.endswith("-time")],
    }
    of_experts = [name for name in names if name.startswith(EXPERTS)]
    for title in (name for name in of_experts if " layer " not in name):
        groups[title] = [name for name in of_experts if name.split(" layer ")[0] == title]
    for title, members in groups.items():
        if members:
            figure = _new_figure(title, scale="linear")
            for (run, name), color in zip(((r, n) for r in runs for n in members), cycle(COLORS)):
                label = f"{run.name}: {name}" if len(runs) > 1 else name
                _curve(figure, run.training, name, color, label)
            yield title, _finish(figure)
    for title in dict.fromkeys(title for run in runs for title in run.by_rank):
        if any(len(ranks) > 1 for run in runs for ranks in run.by_rank.get(title, {}).values()):
            yield f"{title} by rank", _rank_figure(title, runs)


def _rank_figure(title: str, runs: Sequence[RunRecord]) -> Figure:
    """Draw values by rank, a line for each part."""
    from bokeh.models import DataRange1d

    figure = _new_figure(title, scale="linear", x="rank")
    parts = [(run, part, ranks) for run in runs for part, ranks in run.by_rank.get(title, {}).items()]
    for (run, part, ranks), color in zip(parts, cycle(COLORS)):
        label = f"{run.name}: {part}" if len(runs) > 1 else part
        source = {"rank": list(map(int, ranks)), "y": list(ranks.values())}
        figure.line("rank", "y", source=source, color=color, legend_label=label, name=label)
        figure.scatter("rank", "y", source=source, color=color, legend_label=label, name=label, size=6)
    figure.y_range = DataRange1d(start=0)
    return _finish(figure)


def _new_figure(title: str, scale: Scale, x: str = "iteration") -> Figure:
    from bokeh.models import HoverTool
    from bokeh.plotting import figure

    new = figure(
        height=HEIGHT,
        sizing_mode="stretch_width",
        y_axis_type=scale,
        tools="pan,wheel_zoom,box_zoom,reset",
        active_drag="box_zoom",
        x_axis_label=x,
        name=title,
    )
    new.toolbar.logo = None
    new.toolbar.autohide = True
    new.add_tools(HoverTool(tooltips=[("", "$name"), (x, f"@{x}"), ("", "@y")]))
    return new


def _curve(figure: Figure, rows: Sequence[Row], name: str, color: str, label: str) -> None:
    """Draw a line. Iterations without a finite value leave a gap."""
    thinned = thin_out([row for row in rows if name in row], name)
    if thinned:
        figure.line(
            "iteration",
            "y",
            source=_source(thinned, name),
            color=color,
            line_width=2,
            legend_label=label,
            name=label,
        )


def _points(figure: Figure, rows: Sequence[Row], name: str, color: str, label: str, marker: str) -> None:
    rows = [row for row in rows if row.get(name) is not None]
    if rows:
        figure.scatter(
            "iteration",
            "y",
            source=_source(rows, name),
            color=color,
            size=8,
            marker=marker,
            legend_label=label,
            name=label,
        )


def _source(rows: Sequence[Row], name: str) -> dict[str, list[float]]:
    return _columns(rows) | {"y": [math.nan if row.get(name) is None else row[name] for row in rows]}


def _columns(rows: Sequence[Row]) -> dict[str, list[float]]:
    """The coordinates of rows on each horizontal axis."""
    return {axis: [row[axis] for row in rows] for axis in AXES if all(axis in row for row in rows)}


def _verticals(figure: Figure, rows: Sequence[Row], color: str, dash: str, label: str) -> None:
    """Draw a vertical line at each row."""
    if rows:
        figure.vspan(
            x="iteration", source=_columns(rows), line_color=color, line_dash=dash, legend_label=label
        )


def _rows_at(run: RunRecord, events: Iterable[Row], name: str) -> list[Row]:
    """The rows of training that report the iterations of events, and have a value of `name`."""
    rows = [row for row in run.training if row.get(name) is not None]
    iterations = [row["iteration"] for row in rows]
    places = {bisect.bisect_left(iterations, event["iteration"]) for event in events}
    return [rows[i] for i in sorted(places) if i < len(rows)]


def _phase_starts(run: RunRecord) -> list[Row]:
    """The first row of training of each phase of the data but the first."""
    rows = [row for row in run.training if row.get(DATA_PHASE) is not None]
    return [row for before, row in pairwise(rows) if row[DATA_PHASE] != before[DATA_PHASE]]


def _finish(figure: Figure) -> Figure:
    """Set colors that suit a light and a dark page, and a legend whose entries hide their curves."""
    for axis in figure.axis:
        axis.major_label_text_color = axis.axis_label_text_color = GRAY
        axis.axis_line_color = axis.major_tick_line_color = axis.minor_tick_line_color = GRAY
    figure.grid.grid_line_color = GRAY
    figure.grid.grid_line_alpha = 0.25
    figure.background_fill_color = figure.border_fill_color = figure.outline_line_color = None
    if figure.legend:
        figure.legend.background_fill_color = None
        figure.legend.border_line_color = None
        figure.legend.label_text_color = GRAY
        figure.legend.click_policy = "hide"
        figure.legend.orientation = "horizontal"
        # As many columns as fit a narrow page; more rows make the figure higher.
        items: Any = figure.legend[0].items
        longest = max(len(item.label.value) for item in items)
        columns = max(1, min(3, LEGEND_WIDTH // (longest + 5)))
        figure.legend.ncols = columns
        figure.height = HEIGHT + 20 * (len(items) // columns)
        figure.legend.location = "left"
        figure.legend.margin = 0
        figure.add_layout(figure.legend[0], "below")
    return figure


def thin_out(rows: Sequence[Row], name: str) -> list[Row]:
    """Merge neighboring rows until at most `POINTS` are left: mean of `name`, or its maximum for a gradient norm.

    A merged row stands at the last iteration of its rows. A value that is not finite makes that of its row so.
    """
    width = math.ceil(len(rows) / POINTS) or 1
    if width == 1:
        return list(rows)
    merged = []
    for begin in range(0, len(rows), width):
        group = rows[begin : begin + width]
        values = [row[name] for row in group if row[name] is not None]
        whole = len(values) == len(group)
        value = (max(values) if name == "grad norm" else sum(values) / len(values)) if whole else None
        merged.append(group[-1] | {name: value})
    return merged


def _summary(runs: Sequence[RunRecord]) -> str:
    """A table with a row per run: where it stands, and its best figures."""
    head = (
        "run",
        "iterations",
        "tokens",
        "hours",
        "loss",
        "lowest validation loss",
        "tokens per second",
        "MFU",
    )
    rows = []
    for run in runs:
        last: Row = run.training[-1] if run.training else {}
        loss = next((name for name in last if name.endswith("loss")), "")
        evaluated = [row[key] for row in run.evaluations if (key := f"{loss} validation") in row and row[key]]
        recent = run.training[len(run.training) // 2 :]
        mfu = _mean(row.get("mfu") for row in recent)
        rows.append(
            (
                run.name,
                f"{last.get('iteration', 0):,}",
                _number(last["tokens"] * 1e6) if "tokens" in last else "",
                f"{last.get('hours', 0):.2f}",
                _fixed(last.get(loss)),
                _fixed(min(evaluated, default=None)),
                _number(_mean(row.get("tokens per second") for row in recent)),
                "" if mfu is None else f"{mfu:.1%}",
            )
        )
    known = [i for i in range(len(head)) if any(row[i] for row in rows)]
    return _table([head[i] for i in known], [[row[i] for i in known] for row in rows])


def _samples(runs: Sequence[RunRecord]) -> str:
    """A table of texts over iterations for each of the first prompts."""
    tags = list(dict.fromkeys(tag for run in runs for row in run.samples for tag in row["text"]))
    tables: list[str] = []
    for tag in tags[:PROMPTS]:
        rows = []
        for run in runs:
            texts = [(row["iteration"], row["text"][tag]) for row in run.samples if tag in row["text"]]
            # Evenly spaced, with the first and the last.
            chosen = {round(i * (len(texts) - 1) / (TEXTS - 1)) for i in range(TEXTS)} if texts else set()
            rows += [(run.name, f"{texts[i][0]:,}", texts[i][1]) for i in sorted(chosen)]
        hidden = 0 if len(runs) > 1 else 1
        table = _table(("run", "iteration", "text")[hidden:], [row[hidden:] for row in rows])
        opened = "" if tables else " open"
        tables.append(f"<details{opened}><summary>{escape(tag.capitalize())}</summary>{table}</details>")
    left_out = len(tags) - len(tables)
    more = f"<p>{left_out} more prompts are in the file of metrics.</p>" if left_out > 0 else ""
    return f'<section class="samples"><h2>samples</h2>{"".join(tables)}{more}</section>' if tables else ""


def _evaluation_table(runs: Sequence[RunRecord]) -> str:
    """The newest value of everything that was evaluated."""
    newest = [{k: v for row in run.evaluations for k, v in row.items()} for run in runs]
    axes = {"iteration", "consumed samples", *AXES}
    names = [name for name in dict.fromkeys(name for values in newest for name in values) if name not in axes]
    rows = [(name, *(_fixed(values.get(name)) for values in newest)) for name in names]
    return _table(("newest evaluation", *(run.name for run in runs)), rows) if rows else ""


def _one_rank_tables(runs: Sequence[RunRecord]) -> str:
    """Tables of the values by rank of runs that have a single rank, in place of figures."""
    tables: list[str] = []
    for title in dict.fromkeys(title for run in runs for title in run.by_rank):
        values = [run.by_rank.get(title, {}) for run in runs]
        if all(len(ranks) == 1 for parts in values for ranks in parts.values()):
            names = dict.fromkeys(name for parts in values for name in parts)
            rows = [
                (name, *(_number(next(iter(p.get(name, {}).values()), None)) for p in values))
                for name in names
            ]
            tables.append(_table((title, *(run.name for run in runs)), rows))
    return "".join(tables)


def _flag_table(runs: Sequence[RunRecord]) -> str:
    """The flags that differ between the runs, then all."""
    flags = [run.flags for run in runs]
    names = sorted(set().union(*flags))
    rows = [(f"--{name.replace('_', '-')}", *(_flag_value(f.get(name)) for f in flags)) for name in names]
    if not rows:
        return ""
    head = ("flag", *(run.name for run in runs))
    differing = [row for row in rows if len(set(row[1:])) > 1]
    shown = _table(("flags that differ", *head[1:]), differing) if differing else ""
    return f"{shown}<details><summary>All flags</summary>{_table(head, rows)}</details>"


def _flag_value(value: Any) -> str:
    return "" if value is None else " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="table"><table><tr>{cells}</tr>{body}</table></div>'


def _fixed(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _number(value: float | None) -> str:
    """A number with three digits and the unit k, M, B or T."""
    if value is None:
        return ""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"
