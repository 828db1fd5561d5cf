"""The language of code and pages: how docstrings open, names that others replaced, and American spelling."""

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
# Spellings that torch does not have, and a word for which it has "fix".
NOT_AMERICAN = re.compile(
    r"\b("
    r"\w*(behaviour|colour|favour|honour|neighbour)\w*|"
    r"\w+(al|an|ar|el|en|er|ic|il|im|on|or)is(e|ed|er|ers|es|ing|ation|ations)|"
    r"analys(ed|ing)|artefacts?|catalogues?|cent(re|red|res|ring)|grey|licences?|programmes?|"
    r"labell(ed|ing)|modell(ed|ing)|travell(ed|ing)|afterwards|amongst|towards|whilst|mend(s|ed|ing)?"
    r")\b",
    re.IGNORECASE,
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


@pytest.mark.parametrize(
    "path", [*PROSE, *(path for path in CODE if ROOT / "tests" not in path.parents)], ids=name_of
)
def test_spelling_is_american(path: Path) -> None:
    lines = enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
    assert [f"{i}: {word[0]}" for i, line in lines for word in NOT_AMERICAN.finditer(line)] == []


def test_british_spellings_are_found() -> None:
    words = "behaviour initialise optimised parallelising normalisation analysed centre mended".split()
    assert [word for word in words if not NOT_AMERICAN.fullmatch(word)] == []
    words = "behavior initialize optimist promise otherwise noise arise comparison analyses fixed".split()
    assert [word for word in words if NOT_AMERICAN.search(word)] == []
