"""Labelled texts to fine-tune BERT on: pairs of sentences of GLUE's MNLI and QQP, questions of RACE.

Wang et al., "GLUE", 2019 (1804.07461); Lai et al., "RACE", 2017 (1704.04683). Examples are kept as text, and turned
into token ids where they are asked for, which is in worker processes.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron.data.bert_index import SPECIAL_TOKENS
from megatron.data.config import DataConfig
from megatron.flags import InputError, either
from megatron.tokenizer import Tokenizer

LETTERS = ("A", "B", "C", "D")  # of RACE's options
LONGEST_QUESTION = 128  # tokens of a question with an option of it; RACE's articles take the rest


@dataclasses.dataclass(frozen=True)
class Example:
    """Pairs of texts, and a label: the class of the one pair, or which of several pairs is right."""

    pairs: tuple[tuple[str, str], ...]
    label: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """A data set as its authors distribute it.

    Attributes:
        scores: that a model has to give for each pair.
        choices: pairs of an example.
        read: path, and what to do with wrong rows (`None` to raise it), to the examples.
        keeps_first: where a pair is too long the second text is cut; else the longer one.
    """

    scores: int
    choices: int
    read: Callable[[Path, Callable[[str], None] | None], list[Example]]
    keeps_first: bool = False


@dataclasses.dataclass(frozen=True)
class Columns:
    """Which columns of a TSV file hold what, by their names in its first row."""

    first: str
    second: str
    label: str
    labels: tuple[str, ...]

    def read(self, path: Path, skip: Callable[[str], None] | None) -> list[Example]:
        """The examples of a file.

        Args:
            skip: told of each row that cannot be used; None raises it.

        Raises:
            InputError: naming the file and the row, counted from 1 as an editor does.
        """
        rows = _lines(path, skip)
        _, header = next(rows, (1, ""))
        header = header.split("\t")
        wanted = (self.first, self.second, self.label)
        for name in wanted:
            if header == [""]:
                raise InputError(
                    f"{path}: is empty, or begins with an empty line; the first row must name the columns"
                )
            if name not in header:
                raise InputError(
                    f"{path}:1: has no column {name!r}, but {', '.join(map(repr, header[:20]))}; the first row must "
                    f"name the columns, divided by tabs, {either(wanted).replace(' or ', ' and ')} among them"
                )
        at = [header.index(name) for name in wanted]
        ids = {label: i for i, label in enumerate(self.labels)}
        examples = []
        for number, row in rows:
            if not row:
                continue
            # Quotation marks are text here, so that this is no job for a reader of CSV.
            cells = row.split("\t")
            fault = None
            if len(cells) != len(header):
                fault = f"has {len(cells)} column{'s' * (len(cells) > 1)}, and the first row {len(header)}"
            else:
                first, second, label = (cells[i].strip() for i in at)
                if label not in ids:
                    fault = f"{self.label} is {label!r}, which is not {either(self.labels)}"
                elif not first or not second:
                    fault = f"{self.second if first else self.first} is empty"
            if fault is None:
                examples.append(Example(((first, second),), ids[label]))
            else:
                _refuse(f"{path}:{number}: {fault}", skip)
        return examples


def read_race(path: Path, skip: Callable[[str], None] | None) -> list[Example]:
    """The questions of a file of JSON objects, one a line, or of all .txt files below a folder, as `Columns.read`."""
    files = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
    if not files:
        raise InputError(f"{path}: holds no .txt files, which is how RACE comes")
    examples: list[Example] = []
    for file in files:
        for number, line in _lines(file, skip):
            if not line.strip():
                continue
            try:
                examples += _questions(json.loads(line))
            except (ValueError, RecursionError) as error:
                _refuse(f"{file}:{number}: {str(error) or 'is not JSON'}", skip)
    return examples


def _questions(passage: Any) -> list[Example]:
    """The questions on a passage; raises `ValueError` for what is wrong with it."""
    if not isinstance(passage, dict):
        raise ValueError("is not a JSON object")
    for name, kind in (("article", str), ("questions", list), ("options", list), ("answers", list)):
        if not isinstance(passage.get(name), kind):
            raise ValueError(f"{name!r} is missing, or no {'text' if kind is str else 'list'}")
    counts = {name: len(passage[name]) for name in ("questions", "options", "answers")}
    if len(set(counts.values())) > 1:
        raise ValueError(
            "has " + either(f"{n} {name}" for name, n in counts.items()).replace(" or ", " and ")
        )
    article, found = " ".join(passage["article"].split()), []
    for question, options, answer in zip(
        passage["questions"], passage["options"], passage["answers"], strict=True
    ):
        if not isinstance(question, str) or not isinstance(options, list) or len(options) != len(LETTERS):
            raise ValueError(f"question {len(found) + 1} is no text with {len(LETTERS)} options")
        if answer not in LETTERS:
            raise ValueError(f"the answer to question {len(found) + 1} is {answer!r}, not {either(LETTERS)}")
        asked = [
            question.replace("_", str(option)) if "_" in question else f"{question} {option}"
            for option in options
        ]
        found.append(
            Example(tuple((" ".join(text.split()), article) for text in asked), LETTERS.index(answer))
        )
    return found


def _lines(path: Path, skip: Callable[[str], None] | None) -> Iterator[tuple[int, str]]:
    """The lines of a file with their numbers, without line ends and a byte-order mark."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    yield number, line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
                except UnicodeDecodeError as error:
                    _refuse(f"{path}:{number}: is not UTF-8 text ({error.reason})", skip)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None


def _refuse(fault: str, skip: Callable[[str], None] | None) -> None:
    if skip is None:
        raise InputError(f"{fault}; mend it, or give --skip-bad-rows to go on without such rows")
    skip(fault)


FORMATS = {
    "MNLI": Format(
        scores=3,
        choices=1,
        read=Columns("sentence1", "sentence2", "gold_label", ("contradiction", "entailment", "neutral")).read,
    ),
    "QQP": Format(
        scores=2, choices=1, read=Columns("question1", "question2", "is_duplicate", ("0", "1")).read
    ),
    "RACE": Format(scores=1, choices=len(LETTERS), read=read_race, keeps_first=True),
}


class ClassificationDataset:
    """Examples as token ids, and how they become a batch: what the loader asks of a data set."""

    def __init__(
        self,
        examples: Sequence[Example],
        tokenizer: Tokenizer,
        *,
        seq_length: int,
        keeps_first: bool,
        length_multiple: int,
    ) -> None:
        """`length_multiple` as of `BertSamples`.

        Raises:
            InputError: `seq_length` leaves no room for two texts.
        """
        if seq_length < SPECIAL_TOKENS + 2:
            raise InputError(
                f"--seq-length: {seq_length} leaves no room for two texts and {SPECIAL_TOKENS} special tokens; it must "
                f"be at least {SPECIAL_TOKENS + 2}"
            )
        self.examples = examples
        self.tokenizer = tokenizer
        self.words = seq_length - SPECIAL_TOKENS
        self.keeps_first = keeps_first
        self.length_multiple = length_multiple

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, i: int) -> tuple[list[tuple[list[int], list[int]]], int]:
        """Of each pair of example `i` its ids, cut to what fits; and the label."""
        example = self.examples[i]
        ids = self.tokenizer.tokenize_batch([text for pair in example.pairs for text in pair])
        return [self._cut(a, b) for a, b in zip(ids[::2], ids[1::2], strict=True)], example.label

    def _cut(self, a: list[int], b: list[int]) -> tuple[list[int], list[int]]:
        if self.keeps_first:  # of a question the end, where the option stands
            a = a[-min(LONGEST_QUESTION, self.words - 1) :]
        else:  # half of the room, and what the other text leaves
            a = a[: max(self.words - self.words // 2, self.words - len(b))]
        return a, b[: self.words - len(a)]

    def stack(self, samples: Sequence[tuple[list, int]], seq_length: int) -> dict[str, np.ndarray]:
        """In a worker: text, types [pairs, longest], the pairs of a sample after each other; padding_mask, where there
        is padding; labels [samples]."""
        special = self.tokenizer
        pairs = [pair for sample, _ in samples for pair in sample]
        longest = max((len(a) + len(b) for a, b in pairs), default=0) + SPECIAL_TOKENS
        length = min(-(-longest // self.length_multiple) * self.length_multiple, seq_length)
        text = np.full((len(pairs), length), special.pad, dtype=np.int64)
        types, mask = np.zeros_like(text), np.zeros_like(text)
        for row, (a, b) in enumerate(pairs):
            ids = [special.cls, *a, special.sep, *b, special.sep]
            text[row, : len(ids)] = ids
            types[row, len(a) + 2 : len(ids)] = 1
            mask[row, : len(ids)] = 1
        labels = np.array([label for _, label in samples], dtype=np.int64)
        stacked = {"text": text, "types": types, "labels": labels}
        return stacked if mask.all() else stacked | {"padding_mask": mask}

    @staticmethod
    def fields(stacked: dict[str, np.ndarray], eod: int | None, config: DataConfig) -> dict[str, np.ndarray]:
        """In the training process: what `stack` gives."""
        return stacked


class Epochs:
    """A data set gone through several times, each in an order of its own, less what does not fill a batch."""

    def __init__(self, dataset: ClassificationDataset, *, epochs: int, each: int, seed: int) -> None:
        """`each`: samples of an epoch, at most as many as the data set has."""
        self.dataset = dataset
        self.epochs = epochs
        self.each = each
        self.seed = seed
        self.epoch, self.order = -1, np.empty(0, dtype=np.int64)
        self.stack, self.fields = dataset.stack, dataset.fields

    def __len__(self) -> int:
        return self.epochs * self.each

    def __getitem__(self, i: int) -> tuple[list, int]:
        epoch, place = divmod(i, self.each)
        if epoch != self.epoch:
            self.epoch = epoch
            self.order = np.random.default_rng((self.seed, epoch)).permutation(len(self.dataset))
        return self.dataset[int(self.order[place])]
