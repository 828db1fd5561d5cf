"""Draw the predicted schedule of a step as a picture."""

from __future__ import annotations

from pathlib import Path

from megatron.parallel.schedules import BackwardWeight, Compute, Forward, Timeline
from megatron.planner.schedule_costs import makespan
from megatron.planner.simulate import Simulator
from megatron.tool import replacing, write_output_file

# Groups of microbatches (one per stage) in a picture, at most; its width and the height of a row in points.
MAX_GROUPS, WIDTH, ROW = 2, 1200, 22
INK, BACKGROUND, IDLE = "#1f2937", "#f8fafc", "#e5e7eb"
# One color per chunk, repeating.
FORWARD = ("#2f6fb7", "#bcd7f5", "#6aa2dd", "#e3effb")
BACKWARD = ("#2e8b57", "#bfe8cd", "#6cc08b", "#e4f6ea")
WEIGHTS = ("#b7791f", "#f6e0b5", "#d9a441", "#fbf0d9")


def write_picture(simulator: Simulator, path: Path) -> None:
    """Draw the schedule, one row per stage, idle time in gray; SVG or PNG by the file's suffix.

    With many microbatches, it shows a step of the first ones only.

    Raises:
        InputError: the file cannot be written.
        ImportError: matplotlib, needed for PNG, is missing.
    """
    layout = simulator.layout
    microbatches = min(simulator.microbatches, MAX_GROUPS * layout.pipeline)
    timeline = simulator.timeline(microbatches)
    title = (
        f"{layout}: {microbatches} of {simulator.microbatches} microbatches, {1e3 * makespan(timeline):.0f} ms "
        "without gradient reduction and optimizer"
    )
    if path.suffix == ".svg":
        write_output_file("--picture", path, svg(timeline, title))
    else:
        with replacing("--picture", path) as target:
            _write_png(timeline, title, target)


def _boxes(timeline: Timeline) -> list[tuple[int, float, float, str]]:
    """Stage, start, end and color of every compute."""
    return [
        (stage, start, end, _colors(action)[action.chunk % 4])
        for stage, row in enumerate(timeline)
        for action, start, end in row
    ]


def _colors(action: Compute) -> tuple[str, ...]:
    if isinstance(action, BackwardWeight):
        return WEIGHTS
    return FORWARD if isinstance(action, Forward) else BACKWARD


def svg(timeline: Timeline, title: str) -> str:
    """Return the picture as SVG."""
    left, top, unit = 70, 40, WIDTH / makespan(timeline)
    rows = len(timeline)
    width, height = left + WIDTH + 20, top + rows * ROW + 16
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="12" role="img">',
        f"<title>{title}</title>",
        f'<rect width="{width}" height="{height}" fill="{BACKGROUND}"/>',
        f'<text x="16" y="24" font-size="15" fill="{INK}">{title}</text>',
        f'<rect x="{left}" y="{top}" width="{WIDTH}" height="{rows * ROW}" fill="{IDLE}"/>',
    ]
    for stage in range(rows):
        y = top + stage * ROW + 0.7 * ROW
        parts.append(f'<text x="{left - 8}" y="{y:g}" text-anchor="end" fill="{INK}">stage {stage}</text>')
    for stage, start, end, color in _boxes(timeline):
        x, y = left + start * unit, top + stage * ROW
        parts.append(
            f'<rect x="{x:.2f}" y="{y}" width="{(end - start) * unit:.2f}" height="{ROW}" fill="{color}" '
            f'stroke="{INK}" stroke-width="0.2"/>'
        )
    return "\n".join([*parts, "</svg>\n"])


def _write_png(timeline: Timeline, title: str, path: Path) -> None:
    from matplotlib.figure import Figure

    rows = len(timeline)
    figure = Figure(figsize=(WIDTH / 80, 1.2 + rows * ROW / 80), layout="constrained")
    axes = figure.subplots()
    for stage, start, end, color in _boxes(timeline):
        axes.barh(stage, end - start, left=start, height=1, color=color, edgecolor=INK, linewidth=0.2)
    axes.set(title=title, xlabel="seconds", ylabel="stage", yticks=range(rows), facecolor=IDLE)
    axes.set(xlim=(0, makespan(timeline)), ylim=(rows - 0.5, -0.5))
    figure.savefig(path, dpi=120)
