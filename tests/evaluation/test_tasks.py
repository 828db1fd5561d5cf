"""Samples that the zero-shot tasks read from files, and errors for invalid files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from megatron.errors import InputError
from megatron.evaluation.config import EvalTasksConfig, ZeroShotConfig
from megatron.evaluation.tasks import ZeroShotTask, make_task, read_file
from megatron.evaluation.wikitext import detokenize
from megatron.evaluation.windows import spans
from megatron.tokenizer.null import NullTokenizer

IDS = 100


def task_of(name: str, path: Path, *, length: int = 4, **fields: Any) -> ZeroShotTask:
    config = ZeroShotConfig(task=name, valid_data=[str(path)], **fields)
    files = [read_file(path, "--valid-data") for path in config.valid_data]
    return make_task(name, files, NullTokenizer(IDS), config, length=length)


@pytest.mark.parametrize("fill", [False, True])
@pytest.mark.parametrize("stride", [1, 3, 7, 10])
@pytest.mark.parametrize("count", [0, 1, 9, 10, 11, 13, 14, 40, 41])
def test_each_token_is_predicted_once(count: int, stride: int, fill: bool) -> None:
    windows = list(spans(count, length=10, stride=stride, fill=fill))
    predicted = [i for _, first, end in windows for i in range(first, end)]
    assert predicted == list(range(1, count + 1))
    assert all(0 <= begin < first and end - begin <= 11 for begin, first, end in windows)
    # After the first window, each prediction has at least length - stride tokens of context.
    assert all(
        first - begin == 11 - stride or (fill and end == count + 1) for begin, first, end in windows[1:]
    )
    assert all(end - begin == min(11, count + 1) for begin, _, end in windows if fill)


def test_windows_equal_megatron() -> None:
    """Sequence i of Megatron-LM's dataset starts at i * overlap; only the first scores more than `overlap` tokens."""
    windows = list(spans(99, length=20, stride=8, fill=False))
    assert [begin for begin, _, _ in windows] == [8 * i for i in range(len(windows))]
    assert [first for _, first, _ in windows[1:]] == [8 * i + 20 - 8 + 1 for i in range(1, len(windows))]


def test_wikitext_detokenizer() -> None:
    text = (
        " = Robert <unk> = \n \n Robert ( born 12 @-@ 3 @,@ 000 ) said : \" it 's 5 @.@ 5 ° C \" ; the boys ' N "
        "[ sic ] . \n"
    )
    expected = "= Robert <unk> =\n\nRobert (born 12-3,000) said: \"it's 5.5°C\"; the boys' 1 [sic].\n"
    assert detokenize(text).strip(" ") == expected


def test_long_lambada_texts_are_truncated_on_the_left(tmp_path: Path) -> None:
    path = tmp_path / "lambada.jsonl"
    path.write_text('{"text": "1 2 3 4 5 6"}\n{"text": "7 8"}\r\n{"text": "1 2 3 4 5"}')
    task = task_of("LAMBADA", path)
    assert [s.tokens.tolist() for s in task.samples] == [[2, 3, 4, 5, 6], [1, 2, 3, 4, 5], [7, 8]]
    assert [s.scored for s in task.samples] == [1, 1, 1] and task.count == 3
    (note,) = task.notes
    assert note.startswith("LAMBADA: 1 of 3 texts are longer than the context of 4 tokens")
    assert task_of("LAMBADA", path, length=5).notes == []


def test_strict_lambada_tokenizes_the_last_word_alone(shared: Path, tmp_path: Path) -> None:
    from megatron.tokenizer.gpt2 import GPT2BPETokenizer

    data = shared / "data"
    tokenizer = GPT2BPETokenizer(data / "gpt2-vocab.json", data / "gpt2-merges.txt")
    path = tmp_path / "lambada.jsonl"
    path.write_text('{"text": "a unicorn met another unicorn\\n"}')
    config = ZeroShotConfig(task="LAMBADA", valid_data=[str(path)], strict_lambada=True)
    files = [read_file(str(path), "--valid-data")]
    (sample,) = make_task("LAMBADA", files, tokenizer, config, length=64).samples
    assert tokenizer.detokenize(sample.tokens[-sample.scored :].tolist()) == " unicorn"
    assert tokenizer.detokenize(sample.tokens[: -sample.scored].tolist()) == "a unicorn met another"


def test_sum_over_files(tmp_path: Path) -> None:
    paths = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for path, words in zip(paths, (7, 3), strict=True):
        path.write_text(" ".join(map(str, range(words))))
    files = [read_file(str(path), "--valid-data") for path in paths]
    config = ZeroShotConfig(task="PPL", valid_data=[str(path) for path in paths])
    task = make_task("PPL", files, NullTokenizer(IDS), config, length=4)
    eod = NullTokenizer(IDS).eod
    assert sorted(s.tokens.tolist() for s in task.samples) == [
        [2, 3, 4, 5, 6],
        [eod, 0, 1, 2],
        [eod, 0, 1, 2, 3],
    ]
    assert task.count == 10
    assert task.results(10.0)["bits per byte"] == pytest.approx(10 / 0.6931471805599453 / (13 + 5))
    assert task.results(1e5)["ppl"] == float("inf")


INVALID_FILES = {
    "no JSON": ("LAMBADA", b'{"text": "1 2"}\nrubbish\n', r"FILE:2: is not JSON \(Expecting value"),
    "a blank line": ("LAMBADA", b'{"text": "1 2"}\n\n{"text": "1 2"}\n', r"FILE:2: is not JSON"),
    "no text": (
        "LAMBADA",
        b'{"text": "1 2"}\n{"words": "1 2"}\n',
        "FILE:2: is not a JSON object with a string 'text'",
    ),
    "a number": ("LAMBADA", b'{"text": 12}\n', "FILE:1: is not a JSON object with a string 'text'"),
    "a list": ("LAMBADA", b"[1, 2]\n", "FILE:1: is not a JSON object with a string 'text'"),
    "one word": ("LAMBADA", b'{"text": "1 2"}\n{"text": "1"}\n', "FILE:2: its 'text' has no context before"),
    "no words": ("LAMBADA", b'{"text": " "}\n', "FILE:1: its 'text' has no context before"),
    "unpaired surrogate": (
        "LAMBADA",
        b'{"text": "\\ud800 a"}\n',
        "FILE:1: its 'text' has an unpaired surrogate",
    ),
    "bytes": (
        "LAMBADA",
        b'{"text": "1 2"}\n{"text": "\xff"}\n',
        r"FILE:2: is not UTF-8 \(invalid start byte\)",
    ),
    "bytes in text": ("PPL", b"1 2\n3 4\n5 \xe4 6", r"FILE:3: is not UTF-8 \(invalid continuation byte\)"),
    "empty": ("PPL", b"", "--valid-data: FILE is empty"),
    "empty lines": ("LAMBADA", b"\n\n", "--valid-data: FILE is empty"),
    "nothing but space": ("PPL", "\u00a0\n".encode(), "FILE: has no words"),
    "one token": ("WIKITEXT103", b"12\n", "FILE: has 1 tokens and 1 words; WIKITEXT103 needs two"),
    "one line of words": (
        "WIKITEXT103",
        b"12\n13\n",
        "FILE: has 2 tokens and 1 words; WIKITEXT103 needs two",
    ),
}


@pytest.mark.parametrize(("name", "content", "message"), INVALID_FILES.values(), ids=INVALID_FILES.keys())
def test_invalid_file_is_one_line(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(content)
    for strict in {False, name == "LAMBADA"}:
        with pytest.raises(InputError, match=f"^{message.replace('FILE', re.escape(str(path)))}"):
            task_of(name, path, strict_lambada=strict)


def test_other_errors_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("1 2 3 4")
    messages = {
        "--valid-data: nowhere cannot be read (No such file or directory)": lambda: task_of(
            "PPL", Path("nowhere")
        ),
        f"--valid-data: {tmp_path} cannot be read (Is a directory)": lambda: task_of("PPL", tmp_path),
        "--valid-data: /dev/zero cannot be read (larger than 268435456 bytes)": lambda: task_of(
            "PPL", Path("/dev/zero")
        ),
        "--overlapping-eval: a stride of 5 tokens exceeds the window, --seq-length 4": lambda: task_of(
            "PPL", path, overlapping_eval=5
        ),
        "--eval-tasks-data: 1 files for 2 --eval-tasks; give one for each task": lambda: EvalTasksConfig(
            eval_tasks=["PPL", "LAMBADA"], eval_tasks_data=["x"]
        ),
        "--eval-tasks: PPL PPL names a task twice": lambda: EvalTasksConfig(
            eval_tasks=["PPL", "PPL"], eval_tasks_data=["x", "y"]
        ),
        "--strict-lambada: needs --task LAMBADA; leave it out": lambda: task_of(
            "PPL", path, strict_lambada=True
        ),
        "--overlapping-eval: needs --task WIKITEXT103 or PPL; leave it out": lambda: task_of(
            "LAMBADA", path, overlapping_eval=32
        ),
        "--strict-lambada: needs --eval-tasks LAMBADA; leave it out": lambda: EvalTasksConfig(
            eval_tasks=["PPL"], eval_tasks_data=["x"], strict_lambada=True
        ),
        "--overlapping-eval: needs --eval-tasks WIKITEXT103 or PPL; leave it out": lambda: EvalTasksConfig(
            overlapping_eval=32
        ),
    }
    for message, call in messages.items():
        with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
            call()
