"""Datasets to fine-tune BERT on: sentence pairs of GLUE's MNLI and QQP, questions of RACE.

Wang et al., "GLUE", 2019 (1804.07461); Lai et al., "RACE", 2017 (1704.04683). Examples are kept as text and tokenized
when they are read, in worker processes.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from megatron.data.batch import Batch, sequence_field
from megatron.data.bert_index import SPECIAL_TOKENS
from megatron.errors import InputError
from megatron.flags import either
from megatron.tokenizer import Tokenizer

LETTERS = ("A", "B", "C", "D")  # of RACE's options
MAX_QUESTION = 128  # tokens of a question with an option; RACE's articles get the rest

TokenizedExample = tuple[list[tuple[list[int], list[int]]], int]
# Receives a message for each unusable row. None raises it.
OnBadRow = Callable[[str], None] | None


@dataclasses.dataclass(frozen=True)
class Example:
    """Pairs of texts, and a label: the class of the only pair, or the index of the correct pair."""

    pairs: tuple[tuple[str, str], ...]
    label: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """Format in which a dataset is distributed.

    Attributes:
        scores: outputs of the model for each pair.
        choices: pairs per example.
        read: reads the examples of a path.
        keeps_first: truncate the second text if a pair is too long; otherwise the longer one.
    """

    scores: int
    choices: int
    read: Callable[[Path, OnBadRow], list[Example]]
    keeps_first: bool = False


@dataclasses.dataclass(frozen=True)
class Columns:
    """Column names of a TSV file."""

    first: str
    second: str
    label: str
    labels: tuple[str, ...]

    def read(self, path: Path, on_bad_row: OnBadRow) -> list[Example]:
        """Read the examples of a file.

        Raises:
            InputError: with the file and the row, counted from 1.
        """
        rows = _lines(path, on_bad_row)
        header = next(rows, (1, ""))[1].split("\t")
        names = (self.first, self.second, self.label)
        for name in names:
            if header == [""]:
                raise InputError(f"{path}: the first line is empty; it must name the columns")
            if name not in header:
                raise InputError(
                    f"{path}:1: has no column {name!r}; its columns: {', '.join(map(repr, header[:20]))}. The first "
                    f"row must name the tab-separated columns, including {_listed(names)}"
                )
        at = [header.index(name) for name in names]
        ids = {label: i for i, label in enumerate(self.labels)}
        examples = []
        for number, row in rows:
            if not row:
                continue
            # Not csv.reader: quotation marks are part of the text.
            cells = row.split("\t")
            fault = None
            if len(cells) != len(header):
                fault = (
                    f"has {len(cells)} column{'s' * (len(cells) > 1)}, but the first row has {len(header)}"
                )
            else:
                first, second, label = (cells[i].strip() for i in at)
                if label not in ids:
                    fault = f"{self.label} is {label!r}, which is not {either(self.labels)}"
                elif not first or not second:
                    fault = f"{self.second if first else self.first} is empty"
            if fault is None:
                examples.append(Example(((first, second),), ids[label]))
            else:
                _reject(f"{path}:{number}: {fault}", on_bad_row)
        return examples


def read_race(path: Path, on_bad_row: OnBadRow) -> list[Example]:
    """Read the questions of a file with a JSON object per line, or of all .txt files below a directory."""
    files = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
    if not files:
        raise InputError(f"{path}: has no .txt files, the format of RACE")
    examples: list[Example] = []
    for file in files:
        for number, line in _lines(file, on_bad_row):
            if not line.strip():
                continue
            try:
                examples += _questions(json.loads(line))
            except (ValueError, RecursionError) as error:
                _reject(f"{file}:{number}: {str(error) or 'is not JSON'}", on_bad_row)
    return examples


def _questions(passage: Any) -> list[Example]:
    """Parse the questions on a passage; raise `ValueError` if it is malformed."""
    if not isinstance(passage, dict):
        raise ValueError("is not a JSON object")
    for name, kind in (("article", str), ("questions", list), ("options", list), ("answers", list)):
        if not isinstance(passage.get(name), kind):
            raise ValueError(f"{name!r} is missing, or is not {'text' if kind is str else 'a list'}")
    counts = {name: len(passage[name]) for name in ("questions", "options", "answers")}
    if len(set(counts.values())) > 1:
        raise ValueError(f"has {_listed(f'{n} {name}' for name, n in counts.items())}")
    article = " ".join(passage["article"].split())
    found: list[Example] = []
    for question, options, answer in zip(
        passage["questions"], passage["options"], passage["answers"], strict=True
    ):
        if not isinstance(question, str) or not isinstance(options, list) or len(options) != len(LETTERS):
            raise ValueError(f"question {len(found) + 1} is not text with {len(LETTERS)} options")
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


def _lines(path: Path, on_bad_row: OnBadRow) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file with their numbers, without line ends and byte-order mark."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    yield number, line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
                except UnicodeDecodeError as error:
                    _reject(f"{path}:{number}: is not UTF-8 text ({error.reason})", on_bad_row)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None


def _reject(fault: str, on_bad_row: OnBadRow) -> None:
    if on_bad_row is None:
        raise InputError(f"{fault}; correct the row, or skip such rows with --skip-bad-rows")
    on_bad_row(fault)


def _listed(values: Iterable[str]) -> str:
    return either(values).replace(" or ", " and ")


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassificationBatch(Batch):
    """Batch of a classifier. Sequences are pairs of texts; the pairs of an example are consecutive.

    Attributes:
        tokens: int64 [pairs, seq].
        tokentype_ids: int64 [pairs, seq], 1 for the second text, otherwise 0.
        padding_mask: int64 [pairs, seq], 0 on padding; None without padding.
        labels: int64 [examples].
    """

    tokentype_ids: Tensor = sequence_field(dim=1)
    padding_mask: Tensor | None = sequence_field(dim=1, default=None)
    labels: Tensor


class ClassificationDataset:
    """Examples as token ids."""

    def __init__(
        self,
        examples: Sequence[Example],
        tokenizer: Tokenizer,
        *,
        seq_length: int,
        keeps_first: bool,
        length_multiple: int,
    ) -> None:
        """Set up the dataset; `length_multiple` is that of `BertSamples`.

        Raises:
            InputError: `seq_length` is too small for two texts.
        """
        if seq_length < SPECIAL_TOKENS + 2:
            raise InputError(
                f"--seq-length: {seq_length} is too small for two texts and {SPECIAL_TOKENS} special tokens; it must "
                f"be at least {SPECIAL_TOKENS + 2}"
            )
        self.examples = examples
        self.tokenizer = tokenizer
        self.seq_length = seq_length
        self.room = seq_length - SPECIAL_TOKENS
        self.keeps_first = keeps_first
        self.length_multiple = length_multiple

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, i: int) -> TokenizedExample:
        """Return the truncated ids of each pair of example `i`, and the label."""
        example = self.examples[i]
        ids = self.tokenizer.tokenize_batch([text for pair in example.pairs for text in pair])
        return [self._truncate(a, b) for a, b in zip(ids[::2], ids[1::2], strict=True)], example.label

    def _truncate(self, a: list[int], b: list[int]) -> tuple[list[int], list[int]]:
        if self.keeps_first:  # keep the end of a question, which has the option
            a = a[-min(MAX_QUESTION, self.room - 1) :]
        else:  # half of the room, plus the rest that the other text leaves
            a = a[: max(self.room - self.room // 2, self.room - len(b))]
        return a, b[: self.room - len(a)]

    def collate(self, samples: Sequence[TokenizedExample]) -> ClassificationBatch:
        """Make a batch of samples, as long as the longest pair needs."""
        special = self.tokenizer
        pairs = [pair for sample, _ in samples for pair in sample]
        longest = max((len(a) + len(b) for a, b in pairs), default=0) + SPECIAL_TOKENS
        length = min(-(-longest // self.length_multiple) * self.length_multiple, self.seq_length)
        tokens = np.full((len(pairs), length), special.pad, dtype=np.int64)
        types, mask = np.zeros_like(tokens), np.zeros_like(tokens)
        for row, (a, b) in enumerate(pairs):
            ids = [special.cls, *a, special.sep, *b, special.sep]
            tokens[row, : len(ids)] = ids
            types[row, len(a) + 2 : len(ids)] = 1
            mask[row, : len(ids)] = 1
        labels = np.array([label for _, label in samples], dtype=np.int64)
        fields = {"tokens": tokens, "tokentype_ids": types, "labels": labels}
        return ClassificationBatch.from_arrays(fields if mask.all() else fields | {"padding_mask": mask})


class Epochs:
    """Dataset repeated for several epochs, reshuffled in each, without the rest that does not fill a batch."""

    def __init__(
        self, dataset: ClassificationDataset, *, epochs: int, samples_per_epoch: int, seed: int
    ) -> None:
        self.dataset = dataset
        self.epochs = epochs
        self.samples_per_epoch = samples_per_epoch
        self.seed = seed
        self.epoch, self.order = -1, np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        return self.epochs * self.samples_per_epoch

    def __getitem__(self, i: int) -> TokenizedExample:
        epoch, position = divmod(i, self.samples_per_epoch)
        if epoch != self.epoch:
            self.epoch = epoch
            self.order = np.random.default_rng((self.seed, epoch)).permutation(len(self.dataset))
        return self.dataset[int(self.order[position])]

    def collate(self, samples: Sequence[TokenizedExample]) -> ClassificationBatch:
        """Make a batch of samples."""
        return self.dataset.collate(samples)
