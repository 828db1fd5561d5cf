"""The figures: well-formed, consistent with the schedules, and up to date in docs/."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from megatron.parallel.schedules import SCHEDULES
from tools.draw_figures import draw_schedule, figures, main

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "figures"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", sorted(figures()))
def test_figure_in_docs_is_up_to_date(name):
    stored = (FOLDER / name).read_text(encoding="utf-8")
    assert stored == figures()[name], "run python tools/draw_figures.py docs/figures"


@pytest.mark.parametrize("name", sorted(figures()))
def test_everything_lies_inside_the_figure(name):
    root = ElementTree.fromstring(figures()[name])
    _, _, width, height = map(float, root.get("viewBox").split())
    for rect in root.iter(f"{SVG}rect"):
        x, y, w, h = (float(rect.get(key, 0)) for key in ("x", "y", "width", "height"))
        assert x >= 0 and y >= 0 and x + w <= width and y + h <= height
    for words in root.iter(f"{SVG}text"):
        assert 0 < float(words.get("x")) < width and 0 < float(words.get("y")) < height
        assert words.text


@pytest.mark.parametrize("name, chunks", [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_every_compute_is_a_box(name, chunks):
    stages, microbatches = 4, 8
    svg = draw_schedule("", SCHEDULES[name](stages, chunks, microbatches), stages, chunks)
    numbers = [words.text for words in ElementTree.fromstring(svg).iter(f"{SVG}text")]
    for microbatch in range(microbatches):
        assert numbers.count(str(microbatch)) == 2 * stages * chunks


def test_command_writes_the_figures(tmp_path):
    main([str(tmp_path / "new")])
    assert {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "new").iterdir()} == figures()
