"""Draw the figures of the parallel layouts as SVG: `python tools/draw_figures.py docs/figures`.

The schedules are drawn from the action lists that training runs, with the times of the simulator. The output is
deterministic. Every figure has a light background, which keeps it readable on a dark page.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.cli import Parser, run_command
from megatron.parallel.schedules import (
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    one_and_two,
    one_forward_one_backward,
    simulate,
)
from megatron.planner.schedule_costs import bubble_fraction, makespan, peak_in_flight
from megatron.variants.auto_schedule import best_schedule
from megatron.variants.half_memory import v_half, v_min
from megatron.variants.schedules import breadth_first, gpipe, interleaved
from megatron.variants.zero_bubble import dualpipe_v, zb_h1, zb_h2, zb_v

INK = "#1f2937"
LINE = "#6b7280"
PAPER = "#f8fafc"
IDLE = "#e5e7eb"
PLAIN = "#ffffff"
# Fill and text color per chunk, dark to light; forward is blue, backward green, as in arXiv 2104.04473.
FORWARD = [("#2f6fb7", "#ffffff"), ("#bcd7f5", INK), ("#6aa2dd", INK), ("#e3effb", INK)]
BACKWARD = [("#2e8b57", "#ffffff"), ("#bfe8cd", INK), ("#6cc08b", INK), ("#e4f6ea", INK)]
WEIGHTS = [("#b4690e", "#ffffff"), ("#fbdcae", INK), ("#e0a458", INK), ("#fdeed7", INK)]
# Color per rank.
RANK = ["#bcd7f5", "#fde2b3", "#bfe8cd", "#f3c9d7"]


def text(x: float, y: float, words: str, size: int = 13, anchor: str = "middle", color: str = INK) -> str:
    """Text centered vertically at y, and horizontally at x unless `anchor` is "start" or "end"."""
    return (
        f'<text x="{x:g}" y="{y + 0.35 * size:g}" font-size="{size}" text-anchor="{anchor}" fill="{color}">'
        f"{escape(words)}</text>"
    )


def box(
    x: float, y: float, w: float, h: float, fill: str, words: str = "", color: str = INK, size: int = 13
) -> str:
    """A rectangle with centered text."""
    drawn = f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" fill="{fill}" stroke="{LINE}" stroke-width="0.7"/>'
    return drawn + text(x + w / 2, y + h / 2, words, size, color=color) if words else drawn


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    """A straight arrow to (x2, y2)."""
    return (
        f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{INK}" stroke-width="1.3" '
        'marker-end="url(#head)"/>'
    )


def picture(width: float, height: float, title: str, parts: Sequence[str]) -> str:
    """A complete SVG file with a title line."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
            f'height="{height:g}" font-family="Helvetica, Arial, sans-serif" role="img">',
            f"<title>{escape(title)}</title>",
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0 0L8 4L0 8z" fill="{INK}"/></marker></defs>',
            f'<rect width="{width:g}" height="{height:g}" rx="8" fill="{PAPER}"/>',
            text(16, 22, title, 15, "start"),
            *parts,
            "</svg>\n",
        ]
    )


def draw_schedule(
    title: str, schedule: Sequence[Sequence[Compute]], stages: int, chunks: int, *, v_shaped: bool = False
) -> str:
    """Draw a pipeline schedule: a row per rank, time to the right, the bubble in gray, microbatches numbered from 0.

    A backward pass takes twice as long as a forward pass, half of it for weight gradients. The total time of a rank's
    layers does not depend on the number of chunks, so figures of one model have one scale.
    """
    timeline = simulate(
        schedule, stages, lambda rank, action: one_and_two(rank, action) / chunks, v_shaped=v_shaped
    )
    left, top, unit, high = 76, 44, 26, 30
    width, bottom = makespan(timeline) * unit, top + stages * high
    parts = []
    for rank, row in enumerate(timeline):
        y = top + rank * high
        parts += [text(left - 8, y + high / 2, f"rank {rank}", anchor="end"), box(left, y, width, high, IDLE)]
        for action, start, end in row:
            fill, color = _colors(action)
            words = str(action.microbatch)
            parts.append(box(left + start * unit, y, (end - start) * unit, high, fill, words, color, 12))
    microbatches = 1 + max(action.microbatch for action in schedule[0])
    split = any(isinstance(action, BackwardInput) for row in schedule for action in row)
    kinds = {"forward": FORWARD, "backward": BACKWARD, **({"weights": WEIGHTS} if split else {})}
    legend, x = bottom + 26, left
    for chunk in range(chunks):
        of_chunk = f", chunk {chunk}" if chunks > 1 else ""
        for words, colors in kinds.items():
            parts.append(box(x, legend - 7, 14, 14, colors[chunk][0]))
            parts.append(text(x + 20, legend, words + of_chunk, 12, "start"))
            x += (128 if split else 150) if chunks > 1 else 90
    held = ", ".join(str(peak_in_flight(actions)) for actions in schedule)
    if split or v_shaped:
        useful = sum(end - start for _, start, end in timeline[0])
        bubble = f"bubble = {makespan(timeline) / useful - 1:.4g}"
    else:
        bubble = f"bubble (p-1)/(vm) = {bubble_fraction(stages, chunks, microbatches):.4g}"
    facts = f"{bubble}; forwards held at the peak, by rank: {held}"
    parts += [
        box(x, legend - 7, 14, 14, IDLE),
        text(x + 20, legend, "idle", 12, "start"),
        text(left, legend + 24, facts, 12, "start"),
    ]
    return picture(max(left + width, x + 40) + 20, legend + 46, title, parts)


def _colors(action: Compute) -> tuple[str, str]:
    """Colors of a pass and of its number."""
    if isinstance(action, BackwardWeight):
        return WEIGHTS[action.chunk % 4]
    return (FORWARD if isinstance(action, Forward) else BACKWARD)[action.chunk % 4]


def draw_layer_split(layers: int, stages: int, chunks: int) -> str:
    """Draw the assignment of layers to ranks: one chunk per rank above, `chunks` per rank below."""
    left, cell, high = 90, 44, 34
    parts = []
    for top, parts_per_rank in ((60, 1), (150, chunks)):
        size = layers // (stages * parts_per_rank)
        name = "1 chunk" if parts_per_rank == 1 else f"{parts_per_rank} chunks"
        parts.append(text(left - 10, top + high / 2, name, anchor="end"))
        for layer in range(layers):
            fill = RANK[layer // size % stages % len(RANK)]
            parts.append(box(left + layer * cell, top, cell, high, fill, str(layer)))
        for part in range(stages * parts_per_rank):
            middle = left + (part + 0.5) * size * cell
            parts.append(text(middle, top + high + 14, f"rank {part % stages}", 11))
            if parts_per_rank > 1:
                parts.append(text(middle, top + high + 28, f"chunk {part // stages}", 11))
        right = left + layers * cell
        parts += [
            text(left, top - 12, "embedding", 11, "start"),
            text(right, top - 12, "final norm, output, loss", 11, "end"),
        ]
    title = f"{layers} layers on {stages} pipeline ranks"
    return picture(left + layers * cell + 20, 230, title, parts)


def draw_tensor_parallel() -> str:
    """Draw the two matrices of an MLP, divided by columns and by rows (arXiv 1909.08053, figure 3)."""
    parts = [box(20, 120, 60, 60, PLAIN, "X"), box(110, 120, 36, 60, IDLE, "f")]
    parts += [arrow(80, 150, 108, 150), box(664, 120, 36, 60, IDLE, "g"), box(730, 120, 60, 60, PLAIN, "Z")]
    parts.append(arrow(700, 150, 728, 150))
    for rank in range(2):
        y = 50 + rank * 130
        middle, fill = y + 35, RANK[rank]
        parts += [
            text(200, y - 4, f"rank {rank}", 12),
            arrow(146, 150, 178, middle),
            box(180, y + 10, 50, 50, PLAIN, "X"),
            text(244, middle, "×", 16),
            # The other rank's shard of each matrix stays pale.
            box(258, y, 70, 70, PLAIN),
            box(258 + 35 * rank, y, 35, 70, fill, f"A{rank}"),
            arrow(328, middle, 352, middle),
            text(374, y, "GeLU", 11),
            box(354, y + 10, 40, 50, fill, f"Y{rank}"),
            text(410, middle, "×", 16),
            box(424, y, 70, 70, PLAIN),
            box(424, y + 35 * rank, 70, 35, fill, f"B{rank}"),
            arrow(494, middle, 536, middle),
            box(538, y + 10, 80, 50, fill, f"Z{rank} (partial)", size=11),
            arrow(618, middle, 662, 150),
        ]
    parts += [
        text(
            20,
            284,
            "A is split by columns, so GeLU needs no communication; B by rows, so each rank",
            12,
            "start",
        ),
        text(
            20,
            302,
            "computes a full-sized partial sum.  f: forward nothing, backward all-reduce.",
            12,
            "start",
        ),
        text(20, 320, "g: forward all-reduce (Z = Z0 + Z1), backward nothing.", 12, "start"),
    ]
    return picture(810, 340, "Tensor parallelism: the MLP of a layer on 2 ranks", parts)


def draw_sequence_parallel() -> str:
    """Draw the activations of a layer with sequence parallelism (arXiv 2205.05198, figure 5)."""
    blocks = [("LayerNorm", 1), ("g", 0), ("attention", 2), ("ḡ", 0), ("dropout,|LayerNorm", 1), ("g", 0)]
    blocks += [("MLP", 2), ("ḡ", 0), ("dropout", 1)]
    parts, x, top = [], 76.0, 56
    for number, (words, kind) in enumerate(blocks):
        width = (30, 96, 110)[kind]
        if kind == 0:
            parts.append(box(x, top, width, 150, IDLE, words, size=15))
        for rank in range(2 if kind else 0):
            y = top + 80 * rank
            parts.append(box(x, y, width, 70, RANK[rank]))
            share = "sequence" if kind == 1 else "heads" if words == "attention" else "columns"
            which = f"{share}, part {rank}"
            lines = [*words.split("|"), which]
            for line, label in enumerate(lines):
                middle = y + 35 + 15 * (line - (len(lines) - 1) / 2)
                parts.append(text(x + width / 2, middle, label, 12 if label != which else 10))
        x += width
        if number + 1 < len(blocks):
            parts += [arrow(x, top + 35 + 80 * rank, x + 12, top + 35 + 80 * rank) for rank in range(2)]
            x += 12
    parts += [text(68, top + 35 + 80 * rank, f"rank {rank}", 12, "end") for rank in range(2)]
    parts += [
        text(20, 236, "g: forward all-gather along the sequence, backward reduce-scatter.", 12, "start"),
        text(
            20, 254, "ḡ: forward reduce-scatter (sums the partial results), backward all-gather.", 12, "start"
        ),
        text(
            20,
            272,
            "The volume of two all-reduces, plus one all-gather; no activation is stored twice.",
            12,
            "start",
        ),
    ]
    return picture(x + 20, 292, "Sequence parallelism: a layer on 2 ranks", parts)


def draw_distributed_optimizer(ranks: int = 4, buckets: int = 3) -> str:
    """Draw flat gradients in buckets, of which each replica owns a shard."""
    left, cell, gap = 190, 34, 14
    bucket_width = ranks * cell
    rows = [
        ("gradients (bf16 or fp32)", "full on every replica, filled bucket by bucket in backward"),
        ("fp32 master weights, Adam m, v", "each replica holds only its own shards: 1/D of the memory"),
        ("parameters (bf16)", "full again on every replica"),
    ]
    parts = []
    for row, (name, note) in enumerate(rows):
        y = 62 + row * 104
        for line, words in enumerate(name.split(" (") if "(" in name else name.split(", ", 1)):
            words = "(" + words if "(" in name and line else words
            parts.append(text(left - 14, y + 8 + 18 * line, words, 12, "end"))
        for bucket in range(buckets):
            x = left + bucket * (bucket_width + gap)
            for rank in range(ranks):
                parts.append(box(x + rank * cell, y, cell, 34, RANK[rank], f"r{rank}" if row == 1 else ""))
            if row == 0:
                parts.append(text(x + bucket_width / 2, y - 12, f"bucket {bucket}", 12))
            if row < 2:
                parts.append(arrow(x + bucket_width / 2, y + 54, x + bucket_width / 2, y + 98))
                step = ("reduce-scatter", "all-gather")[row]
                parts.append(text(x + bucket_width / 2 + 8, y + 74, step, 12, "start"))
        parts.append(text(left, y + 45, note, 11, "start"))
    width = left + buckets * (bucket_width + gap) + 40
    return picture(width, 340, f"Distributed optimizer: {ranks} replicas, shards colored by owner", parts)


def figures() -> dict[str, str]:
    """The SVG text of each figure of docs/parallelism.md, by file name."""
    stages, microbatches = 4, 8
    sizes = f"{stages} ranks, {microbatches} microbatches"
    once = (stages, 1, microbatches)
    twice = (stages, 2, microbatches)
    return {
        "gpipe.svg": draw_schedule(f"GPipe: {sizes}", gpipe(*once), stages, 1),
        "1f1b.svg": draw_schedule(f"1F1B: {sizes}", one_forward_one_backward(*once), stages, 1),
        "interleaved.svg": draw_schedule(
            f"Interleaved 1F1B: {sizes}, 2 chunks per rank", interleaved(*twice), stages, 2
        ),
        "breadth-first.svg": draw_schedule(
            f"Breadth-first: {sizes}, 2 chunks per rank", breadth_first(*twice), stages, 2
        ),
        "zb-h1.svg": draw_schedule(f"ZB-H1: {sizes}", zb_h1(*once), stages, 1),
        "zb-h2.svg": draw_schedule(f"ZB-H2: {sizes}", zb_h2(*once), stages, 1),
        "zb-v.svg": draw_schedule(
            f"ZB-V: {sizes}, 2 chunks per rank", zb_v(*twice), stages, 2, v_shaped=True
        ),
        "v-half.svg": draw_schedule(
            f"V-Half: {sizes}, 2 chunks per rank", v_half(*twice), stages, 2, v_shaped=True
        ),
        "v-min.svg": draw_schedule(
            f"V-Min: {sizes}, 2 chunks per rank", v_min(*twice), stages, 2, v_shaped=True
        ),
        "dualpipe-v.svg": draw_schedule(
            f"DualPipe-V: {sizes}, 2 chunks per rank", dualpipe_v(*twice), stages, 2, v_shaped=True
        ),
        "auto.svg": draw_schedule(
            f"auto: {sizes}, at most 3 in flight", best_schedule(*once, in_flight=3), stages, 1
        ),
        "layer-split.svg": draw_layer_split(layers=16, stages=stages, chunks=2),
        "tensor-parallel.svg": draw_tensor_parallel(),
        "sequence-parallel.svg": draw_sequence_parallel(),
        "distributed-optimizer.svg": draw_distributed_optimizer(),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder to write the SVG files to")
    folder = parser.parse_args(argv).folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, svg in figures().items():
        (folder / name).write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    run_command(main)
