from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from classification import MNLI_COLUMNS, write_mnli, write_qqp, write_race, write_tsv, write_vocab

from megatron.errors import InputError
from megatron.finetuning.classification import FORMATS, ClassificationDataset, Epochs, Example, read_race
from megatron.tokenizer.bert import BertWordPieceTokenizer

GOOD = {"sentence1": "a river", "sentence2": 'a "stone', "gold_label": "neutral"}


@pytest.fixture
def tokenizer(tmp_path: Path) -> BertWordPieceTokenizer:
    return BertWordPieceTokenizer(str(write_vocab(tmp_path / "vocab.txt")), lowercase=True)


def dataset(examples: list[Example], tokenizer, seq_length: int = 16, keeps_first: bool = False):
    return ClassificationDataset(
        examples, tokenizer, seq_length=seq_length, keeps_first=keeps_first, length_multiple=8
    )


def test_columns_are_found_by_name(tmp_path: Path) -> None:
    dev = [
        *MNLI_COLUMNS[:-1],
        "label2",
        "label3",
        "label4",
        "label5",
        "gold_label",
    ]  # columns of the dev files
    for columns in (MNLI_COLUMNS, dev, ["gold_label", "sentence2", "sentence1"]):
        path = write_tsv(tmp_path / "x.tsv", columns, [GOOD, GOOD | {"gold_label": "entailment"}])
        pair = ("a river", 'a "stone')
        assert FORMATS["MNLI"].read(path, None) == [Example((pair,), 2), Example((pair,), 1)]


def test_files_of_each_format(tmp_path: Path) -> None:
    assert len(FORMATS["MNLI"].read(write_mnli(tmp_path / "mnli.tsv", 50, 0), None)) == 50
    duplicates = FORMATS["QQP"].read(write_qqp(tmp_path / "qqp.tsv", 50, 0), None)
    assert {example.label for example in duplicates} == {0, 1}
    questions = FORMATS["RACE"].read(write_race(tmp_path / "race", 8, 0), None)
    assert len(questions) == 8 and {len(example.pairs) for example in questions} == {4}
    for example in questions:
        asked, article = example.pairs[example.label]
        (name,) = {"anna", "boris", "carla", "dinu"} & set(article.split())
        assert name in asked.rstrip(".").split() and "_" not in asked


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["a\tb"], "x.tsv:2: has 2 columns, but the first row has 3"),
        (
            ["a\tb\tneutral", "a\tb\t-"],
            "x.tsv:3: gold_label is '-', which is not contradiction, entailment or n",
        ),
        (["a\t\tneutral"], "x.tsv:2: sentence2 is empty"),
        (["a\tb\tneutral\t"], "x.tsv:2: has 4 columns"),
    ],
)
def test_invalid_rows(tmp_path: Path, rows: list[str], message: str) -> None:
    path = tmp_path / "x.tsv"
    path.write_text("\n".join(["sentence1\tsentence2\tgold_label", *rows, "a\tb\tneutral"]), encoding="utf-8")
    with pytest.raises(InputError, match=r"--skip-bad-rows") as error:
        FORMATS["MNLI"].read(path, None)
    assert message in str(error.value)
    skipped: list[str] = []
    assert FORMATS["MNLI"].read(path, skipped.append)[-1] == Example((("a", "b"),), 2)
    assert len(skipped) == 1 and message in skipped[0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b"sentence1\tsentence2\n",
            ":1: has no column 'gold_label'; its columns: 'sentence1', 'sentence2'. The first row",
        ),
        (b"", ": the first line is empty; it must name the columns"),
        (b"sentence1\tsentence2\tgold_label\n\na\t\xff\tneutral\n", ":3: is not UTF-8"),
        (None, "cannot be read (No such file or directory)"),
    ],
)
def test_invalid_files(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "x.tsv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError) as error:
        FORMATS["MNLI"].read(path, None)
    assert str(error.value).startswith(str(path)) and message in str(error.value)


PASSAGE = {"article": "a", "questions": ["b _"], "options": [["1", "2", "3", "4"]], "answers": ["C"]}


@pytest.mark.parametrize(
    ("passage", "message"),
    [
        (PASSAGE | {"answers": ["E"]}, "the answer to question 1 is 'E', not A, B, C or D"),
        (PASSAGE | {"options": [["1", "2"]]}, "question 1 is not text with 4 options"),
        (PASSAGE | {"answers": []}, "has 1 questions, 1 options and 0 answers"),
        ({"article": "a"}, "'questions' is missing, or is not a list"),
        (PASSAGE | {"article": 3}, "'article' is missing, or is not text"),
        ([1], "is not a JSON object"),
    ],
)
def test_invalid_passages(tmp_path: Path, passage: object, message: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(PASSAGE) + "\n\n" + json.dumps(passage) + "\n", encoding="utf-8")
    with pytest.raises(InputError) as error:
        read_race(path, None)
    assert str(error.value).startswith(f"{path}:3: {message}")
    assert len(read_race(path, lambda _: None)) == 1


def test_folder_without_passages(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no \.txt files"):
        read_race(tmp_path, None)


def test_batches(tokenizer) -> None:
    data = dataset(
        [Example((("the river", "a"),), 1), Example((("tree", "a bird sees the road"),), 0)], tokenizer
    )
    ids = {piece: i for i, piece in enumerate(tokenizer.vocab)}
    batch = data.collate([data[0], data[1]])
    first = [ids[x] for x in "[CLS] the river [SEP] a [SEP]".split()]
    second = [ids[x] for x in "[CLS] tree [SEP] a bird sees the road [SEP]".split()]
    assert batch.tokens.tolist() == [first + [0] * 10, second + [0] * 7]
    assert batch.tokentype_ids.tolist() == [[0] * 4 + [1] * 2 + [0] * 10, [0] * 3 + [1] * 6 + [0] * 7]
    assert batch.padding_mask.sum(1).tolist() == [6, 9]
    assert batch.labels.tolist() == [1, 0]
    assert data.collate([data[0]]).tokens.shape == (1, 8)
    assert data.collate([]).tokens.shape == (0, 8)


@pytest.mark.parametrize(
    ("lengths", "keeps_first", "kept"),
    [
        ((5, 8), False, (5, 8)),
        ((5, 20), False, (5, 8)),
        ((20, 5), False, (8, 5)),
        ((20, 20), False, (7, 6)),
        ((7, 20), False, (7, 6)),
        ((20, 6), False, (7, 6)),
        ((5, 20), True, (5, 8)),
        ((20, 20), True, (12, 1)),
    ],
)
def test_longer_text_is_truncated(tokenizer, lengths, keeps_first, kept) -> None:
    pair = tuple(" ".join(["tree"] * n) for n in lengths)
    data = dataset([Example((pair,), 0)], tokenizer, keeps_first=keeps_first)
    ((a, b),), _ = data[0]
    assert (len(a), len(b)) == kept


def test_long_question_leaves_room_for_the_article(tokenizer) -> None:
    pair = (" ".join(["tree"] * 300), " ".join(["bird"] * 300))
    ((a, b),), _ = dataset([Example((pair,), 0)], tokenizer, seq_length=256, keeps_first=True)[0]
    assert (len(a), len(b)) == (128, 256 - 3 - 128)


def test_each_epoch_is_shuffled_without_repetition(tokenizer) -> None:
    data = dataset([Example((("tree", "tree"),), i) for i in range(10)], tokenizer)
    epochs = Epochs(data, epochs=3, samples_per_epoch=8, seed=1)
    assert epochs[9][1] == np.random.default_rng((1, 1)).permutation(10)[1]
    orders = np.array([epochs[i][1] for i in range(len(epochs))]).reshape(3, 8)
    assert all(len(set(order)) == 8 for order in orders.tolist())
    assert len({tuple(order) for order in orders.tolist()}) == 3
    assert [Epochs(data, epochs=3, samples_per_epoch=8, seed=1)[i][1] for i in (20, 3)] == [
        orders[2, 4],
        orders[0, 3],
    ]


def test_long_question_keeps_its_option(tokenizer) -> None:
    pair = (" ".join(["tree"] * 30 + ["anna"]), "bird")
    ((a, _),), _ = dataset([Example((pair,), 0)], tokenizer, keeps_first=True)[0]
    assert len(a) == 12 and a[-1] == tokenizer.vocab.index("anna")
