"""The language of docstrings, comments, messages and names: plain technical English with the field's terms."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("megatron", "tools", "benchmarks", "examples", "tests")
CODE = sorted([*ROOT.glob("*.py"), *(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))])
PROSE = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")])

OPENINGS = re.compile(r"(what|of|whether|where|how|which|that)\b", re.IGNORECASE)
PHRASES = (
    "is had from",
    "what is no number",
    "it is gathered again in backward",
    "tell of what ends",
    "nothing compiled, for the model is small",
    "gradients of weights added after them",
    "has the last word",
    "may get nothing done",
    "where all processes stand",
    "collect Python's garbage",
    "without what pads the vocabulary",
    "is scheduled otherwise",
    "that the model sees",
    "overflows from which on",
    "a textbook training loop",
    "written anew to be read",
    "lets it speak",
)
OLD_NAMES = {
    *("Gate", "Standing", "Activity", "together", "Entry", "Part", "Measure", "Relation", "begins_with"),
    *("vocab_positions", "gradient_sum", "add_product", "projected_loss", "rerun", "rerun_attention"),
    *("as_written", "WORTHWHILE", "KEPT", "AT_ONCE", "AHEAD", "BEHIND", "slowed_down", "Growth", "Ticket"),
    *("Reached", "Spent", "Both", "Needs", "Passes", "passing_fault", "say", "tell"),
}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and text of each docstring."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text


def identifiers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and name of everything that is named."""
    for node in ast.walk(tree):
        for attribute in ("name", "id", "attr", "arg"):
            value = getattr(node, attribute, None)
            if isinstance(value, str) and (attribute, value) != ("attr", "tell"):  # of a file
                yield getattr(node, "lineno", 0), value


@pytest.mark.parametrize("path", CODE, ids=name_of)
def test_docstrings_and_names(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    wrong = [f"{line}: {text.splitlines()[0]}" for line, text in docstrings(tree) if OPENINGS.match(text)]
    wrong += [f"{line}: {name}" for line, name in identifiers(tree) if name in OLD_NAMES]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", [path for path in [*CODE, *PROSE] if path != Path(__file__)], ids=name_of)
def test_phrases(path: Path) -> None:
    # A phrase may run over lines of a comment or parts of a string.
    text = re.sub(r"[\s#\"]+", " ", path.read_text(encoding="utf-8")).lower()
    assert [phrase for phrase in PHRASES if phrase.lower() in text] == []
