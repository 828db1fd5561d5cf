"""tools/evaluate.py: the result file, and errors."""

from __future__ import annotations

import hashlib
import json
import math
import types
from pathlib import Path

import pytest
import torch

from megatron import __version__
from megatron.commands import evaluate
from megatron.commands.evaluate import main
from megatron.errors import InputError
from megatron.evaluation.config import ZeroShotConfig
from megatron.evaluation.tasks import ZeroShotTask, make_task, read_file
from megatron.evaluation.zero_shot import make_batches
from megatron.parallel.mesh import ALONE, Axis
from megatron.tokenizer.null import NullTokenizer

TINY = """
    --device cpu --mock-data --tokenizer-type NullTokenizer --vocab-size 300 --num-workers 0 --num-layers 1
    --hidden-size 16 --num-attention-heads 2 --seq-length 16 --micro-batch-size 2 --train-iters 1 --lr 1e-2
    --eval-iters 0 --ops-backend plain
""".split()


@pytest.fixture
def run(pretrain, tmp_path: Path) -> Path:
    """Checkpoint folder of a run."""
    pretrain(*TINY, "--save", tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def numbers(tmp_path: Path) -> Path:
    path = tmp_path / "numbers.txt"
    path.write_text(" ".join(map(str, range(100))))
    return path


def test_the_result_file_suffices_to_reproduce_it(
    run: Path, numbers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "result.json"
    words = f"--load {run} --task PPL --valid-data {numbers} --device cpu --overlapping-eval 4"
    main([*words.split(), "--output-path", str(output)])
    result = json.loads(output.read_text())
    dashes, line, _ = capsys.readouterr().out.splitlines()
    loss = result["results"]["avg loss"]
    assert line.startswith(
        f" validation results on PPL | avg loss: {loss:.4E} | ppl: {math.exp(loss):.4E} | word ppl"
    )
    assert dashes == "-" * len(line)
    assert loss == pytest.approx(math.log(301), rel=0.05)  # an untrained model
    data = numbers.read_bytes()
    assert result["data"] == [
        {"file": str(numbers), "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    ]
    assert result["checkpoint"] == str(run / "iter_0000001") and result["iteration"] == 1
    assert (result["task"], result["samples"], result["scored tokens"]) == ("PPL", 1 + (100 - 16) // 4, 100)
    assert result["flags"]["overlapping_eval"] == 4 and result["flags"]["seq_length"] is None
    computed = result["computed"]
    assert (computed["seq_length"], computed["device"], computed["dtype"]) == (16, "cpu", "float32")
    assert (computed["megatron"], computed["torch"]) == (__version__, torch.__version__)


def test_the_progress_bar_ends_full(
    numbers: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It counts the batches of the first of two replicas, which has the last sample."""
    config = ZeroShotConfig(task="PPL", valid_data=(str(numbers),), micro_batch_size=2)
    task = make_task("PPL", [read_file(str(numbers), "")], NullTokenizer(300), config, length=16)
    mesh = types.SimpleNamespace(dp=Axis(0, 2), pp=ALONE, tp=ALONE, is_first=True)
    assert len(task.samples) == 7

    def advance_by_batch(
        stages: object, task: ZeroShotTask, *, micro_batch_size: int, advance, by_position: object
    ) -> float:
        for _ in make_batches(task, micro_batch_size=micro_batch_size, dp=mesh.dp):
            advance()
        return 0.0

    monkeypatch.setattr(evaluate, "evaluate", advance_by_batch)
    evaluate.run(types.SimpleNamespace(mesh=mesh), task, 2, None)
    assert " 2/2 " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--task PPL", "--valid-data is required: plain text files"),
        ("--valid-data FILE", "--task is required: WIKITEXT103"),
        ("--task PPL --valid-data nowhere", "--valid-data: nowhere cannot be read"),
        (
            "--task PPL --valid-data FILE --seq-length 17",
            "--seq-length: 17 is longer than the model's context of 16",
        ),
        (
            "--task PPL --valid-data FILE --overlapping-eval 17",
            "--overlapping-eval: a stride of 17 tokens exceeds the window",
        ),
        ("--task LAMBADA --valid-data FILE", "FILE:1: is not JSON"),
        (
            "--task PPL --valid-data FILE --output-path nowhere/x",
            "--output-path: nowhere/x cannot be written: there is no directory",
        ),
        (
            "--task PPL --valid-data FILE --output-path /dev/full",
            "--output-path: /dev/full cannot be written",
        ),
        (
            "--task PPL --valid-data FILE --tensor-model-parallel-size 2",
            "--tensor-model-parallel-size 2 x",
        ),
    ],
)
def test_wrong_flags_are_one_line(flags: str, message: str, run: Path, numbers: Path) -> None:
    with pytest.raises(InputError) as error:
        main(["--load", str(run), "--device", "cpu", *flags.replace("FILE", str(numbers)).split()])
    assert str(error.value).startswith(message.replace("FILE", str(numbers)))
