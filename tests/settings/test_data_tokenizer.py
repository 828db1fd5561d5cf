"""Training takes the tokenizer from the record beside the data, and refuses another one."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.__main__ import COMMANDS
from megatron.checkpoint.find import find_checkpoint
from megatron.checkpoint.tokenizer import saved_tokenizer
from megatron.commands.inspect_data import main as inspect
from megatron.data.indexed_writer import IndexedDatasetWriter
from megatron.errors import InputError
from megatron.tokenizer import build_tokenizer
from megatron.tokenizer.config import TokenizerConfig
from megatron.tokenizer.record import describe_tokenizer, write_tokenizer
from megatron.tokenizer.train import train_bpe

FLAGS = """
    --num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --micro-batch-size 1 --train-iters 1
    --eval-iters 0 --lr 1e-3 --device cpu --num-workers 0 --ops-backend plain --no-progress
""".split()


def write(prefix: Path, ids: int | None) -> Path:
    """Write token files, with the record of a tokenizer of `ids` ids."""
    with IndexedDatasetWriter(prefix, "uint16") as writer:
        for i in range(20):
            writer.add_document([[i, 1, 2, 3, 4, 5, 6, 7, 8, 9]])
    if ids is not None:
        config = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=ids - 1)
        write_tokenizer(str(prefix), describe_tokenizer(build_tokenizer(config), config), {})()
    return prefix


def test_no_flags_are_needed(
    pretrain: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "made").mkdir()
    write(tmp_path / "made/o", 100)
    shutil.move(tmp_path / "made", tmp_path / "moved")
    out = pretrain(*FLAGS, "--data-path", tmp_path / "moved/o", "--save", tmp_path / "run")
    assert "vocabulary 100\n" in out
    # Its own checkpoint continues, also with the tokenizer named.
    again = [*FLAGS, "--train-iters", 2, "--load", tmp_path / "run", "--data-path", tmp_path / "moved/o"]
    pretrain(*again, "--tokenizer-type", "NullTokenizer", "--vocab-size", 99)
    pretrain(*again, "--use-checkpoint-args")


def test_another_tokenizer_is_refused(pretrain: Callable[..., str], tmp_path: Path) -> None:
    first, second = write(tmp_path / "a", 100), write(tmp_path / "b", 90)
    null = ["--tokenizer-type", "NullTokenizer", "--vocab-size"]
    message = (
        rf"^{first} was made with NullTokenizer \(100 ids\), but the tokenizer of this run is NullTokenizer "
        r"\(201 ids\); leave out the tokenizer's flags to train with that of the data, or preprocess the text again$"
    )
    with pytest.raises(InputError, match=message):
        pretrain(*FLAGS, "--data-path", first, *null, 200)
    with pytest.raises(InputError, match=message):
        pretrain(
            *FLAGS, "--train-data-path", first, "--valid-data-path", write(tmp_path / "c", None), *null, 200
        )
    with pytest.raises(
        InputError, match=rf"^{second} was made with NullTokenizer \(90 ids\), but {first} with"
    ):
        pretrain(*FLAGS, "--data-path", 0.5, first, 0.5, second)


def test_data_without_a_record_works_as_before(pretrain: Callable[..., str], tmp_path: Path) -> None:
    foreign, ours = write(tmp_path / "a", None), write(tmp_path / "b", 100)
    with pytest.raises(InputError, match="--vocab-file is required"):
        pretrain(*FLAGS, "--data-path", foreign)
    out = pretrain(*FLAGS, "--data-path", foreign, "--tokenizer-type", "NullTokenizer", "--vocab-size", 200)
    assert "vocabulary 201\n" in out
    assert "vocabulary 100\n" in pretrain(*FLAGS, "--data-path", 1, foreign, 1, ours)


def test_inspect_data_uses_the_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inspect([str(write(tmp_path / "a", 100)), "--show", "1"])
    out = capsys.readouterr().out
    assert "tokenizer  NullTokenizer (100 ids)" in out and "highest id 19, of 100 ids" in out
    assert out.endswith("--- document 0\n0 1 2 3 4 5 6 7 8 9\n")
    with pytest.raises(
        InputError, match="--show needs the tokenizer of the files, which have no record of it"
    ):
        inspect([str(write(tmp_path / "b", None)), "--show", "1"])


def test_the_folder_of_a_tokenizer(pretrain: Callable[..., str], tmp_path: Path) -> None:
    """The checkpoint has the flags that the folder stands for, and copies of its files."""
    for name, content in train_bpe(iter(["the hen and the hat"]), 259).items():
        (tmp_path / name).write_text(content)
    run = ["--mock-data", "--save", tmp_path / "run"]
    assert "vocabulary 259\n" in pretrain(*FLAGS, *run, "--tokenizer", tmp_path)
    saved = saved_tokenizer(find_checkpoint(str(tmp_path / "run"), None))
    assert saved.tokenizer_type == "GPT2BPETokenizer" and Path(saved.merge_file).is_file()
    assert str(tmp_path / "run") in saved.merge_file
    with pytest.raises(InputError, match=r"^--tokenizer and --vocab-file exclude each other"):
        pretrain(*FLAGS, *run, "--tokenizer", tmp_path, "--vocab-file", "x")


@pytest.mark.parametrize(
    "command", ["convert", "evaluate", "finetune-bert", "generate", "inspect-data", "preprocess", "serve"]
)
def test_every_command_with_a_tokenizer_takes_its_folder(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    groups = ["tokenizer-folder"] if command == "finetune-bert" else []
    monkeypatch.setattr("sys.argv", [command, "--help", *groups])
    with pytest.raises(SystemExit, match=r"^0$"):
        importlib.import_module(COMMANDS[command][0]).main()
    assert "--tokenizer PATH" in capsys.readouterr().out
