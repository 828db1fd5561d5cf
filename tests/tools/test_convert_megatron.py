"""tools/convert_checkpoint.py from and to Megatron-LM's format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from nvidia import VOCAB, assert_equal, checkpoint_of, edit, weights, written
from tqdm import tqdm

from megatron.checkpoint.find import find_checkpoint
from megatron.commands.convert_checkpoint import main
from megatron.errors import InputError
from megatron.interop.nvidia.read import open_megatron
from megatron.tokenizer.config import TokenizerConfig


@pytest.fixture
def convert(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Function that runs the tool in the test's process and returns its stdout."""

    def run(source: str, target: str, load: Path, save: Path, *flags: object) -> str:
        words = ("--from", source, "--to", target, "--load", load, "--save", save, *flags)
        main([str(word) for word in words])
        return capsys.readouterr().out

    return run


def test_round_trip(convert: Callable[..., str], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    root = written(tmp_path, tensor=2)
    printed = convert("megatron", "native", root, tmp_path / "native")
    assert "nothing was compared with another implementation" in printed
    sizes = ("--target-tensor-model-parallel-size", 4, "--target-pipeline-model-parallel-size", 2)
    convert("native", "megatron", tmp_path / "native", tmp_path / "back", *sizes)
    assert_equal(
        weights(open_megatron(tmp_path / "back", TokenizerConfig())), weights(checkpoint_of(tmp_path))
    )
    assert len(list(tmp_path.glob("back/release/mp_rank_0[0-3]_00[01]"))) == 8
    printed = convert("megatron", "huggingface", tmp_path / "back", tmp_path / "hf")
    assert "logits of transformers from" in printed
    convert("huggingface", "megatron", tmp_path / "hf", tmp_path / "again")
    found = weights(open_megatron(tmp_path / "again", TokenizerConfig()))
    assert_equal(found, weights(checkpoint_of(tmp_path)))


def test_resharding(convert: Callable[..., str], tmp_path: Path) -> None:
    root, sizes = written(tmp_path, tensor=2), ("--target-pipeline-model-parallel-size", 2)
    convert("megatron", "megatron", root, tmp_path / "divided", *sizes)
    assert len(list(tmp_path.glob("divided/release/mp_rank_00_00[01]"))) == 2
    found = weights(open_megatron(tmp_path / "divided", TokenizerConfig()))
    assert_equal(found, weights(checkpoint_of(tmp_path)))


def test_an_unconfirmed_number_of_heads_is_noted(convert: Callable[..., str], tmp_path: Path) -> None:
    """Equal logits do not confirm the number of heads, so a note says so."""
    root = written(tmp_path)
    assert "number of heads" not in convert("megatron", "native", root, tmp_path / "native")
    edit(root, lambda content: content.pop("args"))
    flags = ("--num-attention-heads", 8, "--vocab-size", VOCAB)  # the model has 4
    printed = convert("megatron", "native", root, tmp_path / "wrong", *flags)
    assert "note: --num-attention-heads 8 cannot be checked against" in printed
    assert "read back by this program) are the same" in printed


def test_the_progress_bar_counts_written_bytes(
    convert: Callable[..., str], shared: Path, tmp_path: Path, monkeypatch
) -> None:
    """For a checkpoint with optimizer state, the bar counts only the weights."""
    bars = []

    class Bar(tqdm):
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)
            bars.append(self)

    monkeypatch.setattr("megatron.commands.convert_checkpoint.tqdm", Bar)
    load = shared / "vectors" / "gpt-v2.5" / "after6_tp1"
    convert("megatron", "native", load, tmp_path / "native", "--vocab-size", 5000)
    for target in ("megatron", "huggingface"):
        convert("native", target, tmp_path / "native", tmp_path / target)
    assert [bar.n / bar.total for bar in bars] == pytest.approx([1, 1, 1], abs=0.05)


def test_tokenizer_and_optimizer_are_converted(
    convert: Callable[..., str], shared: Path, tmp_path: Path
) -> None:
    data = shared / "data"
    flags = ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", data / "gpt2-tiny-vocab.json"]
    flags += ["--merge-file", data / "gpt2-tiny-merges.txt"]
    load = shared / "vectors" / "gpt-v2.5" / "after6_tp1"
    convert("megatron", "native", load, tmp_path / "with", *flags)
    found = find_checkpoint(str(tmp_path / "with"), None)
    assert list(found.tensors) == ["model", "optimizer"] and found.iteration == 6
    assert {"tokenizer/gpt2-tiny-vocab.json", "tokenizer/gpt2-tiny-merges.txt"} <= found.manifest.files.keys()
    assert "not the optimizer state" in convert("native", "megatron", tmp_path / "with", tmp_path / "back")
    convert("megatron", "native", load, tmp_path / "without", "--no-load-optim", "--vocab-size", 5000)
    assert find_checkpoint(str(tmp_path / "without"), None).tensors.keys() == {"model"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("native", "megatron", "--num-attention-heads", 4),
            "--no-load-optim and the flags of tokenizer and model need",
        ),
        (
            ("native", "megatron", "--no-load-optim"),
            "--no-load-optim and the flags of tokenizer and model need",
        ),
        (
            ("megatron", "native", "--vocab-file", "x"),
            "--tokenizer is required with other tokenizer flags",
        ),
        (
            ("megatron", "native", "--target-tensor-model-parallel-size", 2),
            "--target-tensor-model-parallel-size: 2 needs --to megatron",
        ),
        (
            ("native", "megatron", "--target-pipeline-model-parallel-size", 0),
            "--target-pipeline-model-parallel-size: 0 is too small; it must be at least 1",
        ),
        (("megatron", "native", "--num-attention-heads", 8), "--num-attention-heads: 8 contradicts "),
        (
            ("native", "megatron"),
            "holds a Megatron-LM checkpoint; convert it with megatron convert",
        ),
    ],
)
def test_bad_input(convert: Callable[..., str], tmp_path: Path, words: tuple, message: str) -> None:
    source, target, *flags = words
    with pytest.raises(InputError) as caught:
        convert(source, target, written(tmp_path), tmp_path / "x", *flags)
    assert message in str(caught.value)
    assert not (tmp_path / "x").exists()


def test_training_from_it_suggests_conversion(pretrain: Callable, tmp_path: Path) -> None:
    root = written(tmp_path)
    flags = "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 --lr 1e-3"
    flags += (
        " --train-iters 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 99 --device cpu --finetune"
    )
    with pytest.raises(InputError, match=r"^--load: \S+ holds a Megatron-LM checkpoint; convert it with"):
        pretrain(*flags.split(), "--load", root)
