"""Labelled texts in the formats of GLUE and RACE, made by rules that can be learned."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

WORDS = (
    "the",
    "a",
    "of",
    "on",
    "and",
    "river",
    "stone",
    "house",
    "tree",
    "bird",
    "road",
    "cloud",
    "walks",
    "sees",
)
ASKING = ("how", "why", "when")
NAMES = ("anna", "boris", "carla", "dinu")
MARKS = {"contradiction": "never", "entailment": "surely", "neutral": "perhaps"}

MNLI_COLUMNS = """
    index promptID pairID genre sentence1_binary_parse sentence2_binary_parse sentence1_parse sentence2_parse sentence1
    sentence2 label1 gold_label
""".split()
QQP_COLUMNS = ["id", "qid1", "qid2", "question1", "question2", "is_duplicate"]


def write_vocab(path: Path) -> Path:
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "?", ".", "##s", "met", "who"]
    pieces += [*WORDS, *ASKING, *NAMES, *MARKS.values()]
    path.write_text("\n".join(pieces) + "\n", encoding="utf-8")
    return path


def words(rng: np.random.Generator, count: int) -> list[str]:
    return rng.choice(WORDS, count).tolist()


def write_tsv(path: Path, columns: list[str], rows: list[dict[str, str]]) -> Path:
    lines = [columns, *([row.get(name, "x") for name in columns] for row in rows)]
    path.write_text("".join("\t".join(line) + "\n" for line in lines), encoding="utf-8")
    return path


def write_mnli(path: Path, count: int, seed: int) -> Path:
    """The label is told by a word of the second sentence."""
    rng, rows = np.random.default_rng(seed), []
    for _ in range(count):
        label = str(rng.choice(list(MARKS)))
        second = words(rng, int(rng.integers(3, 9)))
        second.insert(int(rng.integers(len(second) + 1)), MARKS[label])
        first = words(rng, int(rng.integers(3, 12)))
        rows.append({"sentence1": " ".join(first), "sentence2": " ".join(second), "gold_label": label})
    return write_tsv(path, MNLI_COLUMNS, rows)


def write_qqp(path: Path, count: int, seed: int) -> Path:
    """Questions are the same if they begin with the same word."""
    rng, rows = np.random.default_rng(seed), []
    for _ in range(count):
        same = bool(rng.integers(2))
        first = str(rng.choice(ASKING))
        second = first if same else str(rng.choice([word for word in ASKING if word != first]))
        asked = [" ".join([word, *words(rng, 4)]) + "?" for word in (first, second)]
        rows.append({"question1": asked[0], "question2": asked[1], "is_duplicate": str(int(same))})
    return write_tsv(path, QQP_COLUMNS, rows)


def write_race(folder: Path, count: int, seed: int) -> Path:
    """The right option is the one name that the article names. A file holds one article, with two questions."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    for i in range(count // 2):
        name = str(rng.choice(NAMES))
        article = words(rng, 8)
        article.insert(int(rng.integers(9)), name)
        options = [rng.permutation(NAMES).tolist() for _ in range(2)]
        passage = {
            "article": " ".join(article),
            "questions": ["who sees the bird?", "the house of _."],
            "options": options,
            "answers": ["ABCD"[names.index(name)] for names in options],
            "id": f"{i}.txt",
        }
        (folder / f"{i}.txt").write_text(json.dumps(passage), encoding="utf-8")
    return folder
