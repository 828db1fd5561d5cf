"""Log lines: the short format for people, Megatron-LM's for scripts, and the first screen of a run."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from intervals import interval

from megatron.data.indexed_writer import IndexedDatasetWriter
from megatron.reports.log_formats import LOG_FORMATS
from megatron.training.report import EvalResult, Interval

SHORT, MEGATRON = LOG_FORMATS["short"], LOG_FORMATS["megatron"]
NAN = float("nan")
CLOCK = r"\d\d:\d\d:\d\d  "


def trainer(
    iteration: int = 10, *, loss_names: tuple[str, ...] = ("lm loss",), sizes: tuple = (8,), **f: Any
):
    """Return what the formats need of a trainer."""
    return SimpleNamespace(
        train_iters=f.get("train_iters", 500),
        state=SimpleNamespace(iteration=iteration),
        task=SimpleNamespace(loss_names=loss_names),
        batch_schedule=SimpleNamespace(sizes=lambda: sizes),
    )


def short(made: Interval, **fields: Any) -> list[str]:
    """The lines of an interval without the time, which they are checked to begin with."""
    first, *others = SHORT.training(trainer(**{"train_iters": made.train_iters, **fields}), made).split("\n")
    assert re.match(CLOCK, first) and all(len(line) < 120 for line in (first, *others))
    return [first[10:], *others]


def evaluated(**fields: Any) -> EvalResult:
    values = {"lm loss validation": 5.0, "lm loss validation ppl": math.exp(5.0)}
    return EvalResult(**{"title": "validation", "where": "iteration 10", "values": values, **fields})


def test_the_short_line() -> None:
    assert short(interval([(9, 2.5, 1.0), (10, 3.5, 2.0)])) == [
        " 10/500  loss 3.0000  grad norm 2.000  lr 1.50e-04  12,346 tokens/s  MFU 45.3%  ETA 1m00s"
    ]


def test_skipped_iterations_and_other_rarities_follow_the_usual_columns() -> None:
    made = interval([(9, 2.5, 1.0), (10, NAN, NAN)])
    made.values["params norm"] = 31.5
    made.rows[-1] |= {"loss scale": 65536.0, "num zeros": 1234567.0}
    assert short(made, sizes=(4, 8)) == [
        " 10/500  loss nan  grad norm nan  lr 1.50e-04  12,346 tokens/s  MFU 45.3%  ETA 1m00s  skipped 1 of 2",
        "          not finite 1  loss scale 65536  batch size 8  params norm 31.500  zeros 1.23M",
    ]


def test_the_usual_columns_of_a_long_run_of_bert_are_one_line() -> None:
    row = {"iteration": 1000000, "consumed samples": 10**9, "lm loss": 10.4321, "sop loss": 0.6931}
    made = Interval(
        lr=1.5e-4,
        batch_size=8,
        rows=[row | {"grad norm": 12.345, "skipped": 0.0}],
        loss_names=("lm loss", "sop loss"),
        train_iters=2000000,
        iterations=1,
        seconds=1.5,
        values={"tokens per second": 12345678.0, "mfu": 0.4531},
    )
    (line,) = short(made, iteration=1000000)
    assert line == (
        "1000000/2000000  lm 10.4321  sop 0.6931  grad norm 12.345  lr 1.50e-04  12.3M tokens/s  MFU 45.3%  ETA 17d08h"
    )


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (59.6, "1m00s"), (3720, "1h02m"), (7200 * 50, "4d04h")]
)
def test_time_left(seconds: float, text: str) -> None:
    made = interval([(400, 1.0, 1.0)], seconds=seconds / 100)
    assert short(made, iteration=400)[0].endswith(f"  ETA {text}")


@pytest.mark.parametrize(
    ("value", "text"), [(0.4, "0"), (99999, "99,999"), (123456, "123k"), (999900, "1M"), (2.5e9, "2.5G")]
)
def test_tokens_per_second(value: float, text: str) -> None:
    made = interval([(10, 1.0, 1.0)], values={"tokens per second": value, "mfu": 0.5})
    assert f"  {text} tokens/s  " in short(made)[0]


def test_short_evaluations() -> None:
    def line(result: EvalResult, **fields: Any) -> str:
        return re.sub(f"^{CLOCK}", "", SHORT.evaluation(trainer(**fields), result))

    assert line(evaluated()) == " 10/500  validation loss 5.0000  perplexity 148.4"
    over = {"lm loss test": 25.0, "lm loss test ppl": math.exp(20.0)}
    assert line(evaluated(title="test", values=over)) == " 10/500  test loss 25.0000  perplexity >4.85e+08"
    both = {"lm loss test": 5.0, "lm loss test ppl": 148.4, "sop loss test": 0.5, "sop loss test ppl": 1.6}
    assert line(evaluated(title="test", values=both), loss_names=("lm loss", "sop loss")) == (
        " 10/500  test lm loss 5.0000  lm loss ppl 148.4  sop loss 0.5000  sop loss ppl 1.6000"
    )
    task = evaluated(title="PPL", values={"PPL avg loss": 4.0, "PPL ppl": 54.6}, line=" validation results")
    assert line(task) == " 10/500  PPL avg loss 4.0000  ppl 54.6000"


def test_megatron_lms_line_byte_for_byte() -> None:
    line = MEGATRON.training(trainer(), interval([(9, 2.5, 1.0), (10, 3.5, 2.0)]))
    assert line == (
        " iteration       10/     500 | consumed samples:           80 | elapsed time per iteration (ms): 123.4 | "
        "learning rate: 1.500E-04 | global batch size:     8 | lm loss: 3.000000E+00 | loss scale: 1.0 | "
        "grad norm: 2.000 | number of skipped iterations:   0 | number of nan iterations:   0 |"
    )
    # The regular expression by which scripts parse the loss from Megatron-LM's logs.
    assert re.search(r"lm loss: ([0-9.E+-]+) \|", line).group(1) == "3.000000E+00"
    made = interval([(9, 2.5, 1.0), (10, NAN, NAN)])
    made.values["params norm"] = 3.0
    line = MEGATRON.training(trainer(), made)
    assert "lm loss: nan |" in line and "grad norm: nan" in line and "params norm: 3.000" in line
    assert "number of nan iterations:   1 |" in line


def test_megatron_lms_lines_on_evaluations() -> None:
    frame, line, end = MEGATRON.evaluation(trainer(), evaluated()).split("\n")
    assert (
        line
        == " validation loss at iteration 10 | lm loss value: 5.000000E+00 | lm loss PPL: 1.484132E+02 | "
    )
    assert frame == end == "-" * len(line)
    over = {"lm loss test": 25.0, "lm loss test ppl": math.exp(20.0)}
    assert "lm loss PPL: >4.851652E+08" in MEGATRON.evaluation(
        trainer(), evaluated(title="test", values=over)
    )
    assert "\n results | \n" in MEGATRON.evaluation(trainer(), evaluated(line=" results | "))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A token file of 4,000 tokens."""
    with IndexedDatasetWriter(str(tmp_path / "corpus"), np.uint16) as writer:
        for i in range(200):
            writer.add_document([np.arange(i, i + 20) % 250])
    return tmp_path / "corpus"


FLAGS = """
    --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 10 --micro-batch-size 2 --global-batch-size 8
    --train-iters 20 --lr 1e-2 --log-interval 1 --eval-interval 10 --eval-iters 1 --num-workers 0 --device cpu
    --tokenizer-type NullTokenizer --vocab-size 250 --split 90,5,5
""".split()


def test_the_first_loss_is_on_the_first_screen(
    command: Callable, pretrain: Callable, corpus: Path, tmp_path: Path
) -> None:
    run = [
        *FLAGS,
        "--data-path",
        corpus,
        "--save",
        tmp_path / "run",
        "--load",
        tmp_path / "run",
    ]
    run += ["--save-interval", 10, "--tensorboard-dir", tmp_path / "events"]
    done = command("pretrain_gpt.py", *run, "--exit-interval", 10)
    screen = re.split(rf"^{CLOCK}", done.stderr + done.stdout, maxsplit=1, flags=re.M)[0].splitlines()
    assert len(screen) < 15 and all(len(line) < 120 + len(str(tmp_path)) for line in screen)
    for line in (
        "model: GPT, 7,488 parameters; 1 layer, hidden size 16, 2 heads, vocabulary 251",
        "layout: 1 process",
        f"checkpoints: {tmp_path / 'run'}, every 10 iterations and at the end",
        f"training: iterations 1 to 20 of 8 samples; {tmp_path / 'run'} holds no checkpoint yet",
        "tokens: 1.6k (160 samples x 10), 0.444 epochs of the 3.6k of the data, 0.214 per "
        "parameter (compute-optimal: about 20)",
    ):
        assert line in screen, screen
    screen = re.split(rf"^{CLOCK}", pretrain(*run), maxsplit=1, flags=re.M)[0].splitlines()
    resumed = f"training: iterations 11 to 20 of 8 samples, resumed from {tmp_path / 'run'} at iteration 10"
    assert resumed in screen


def test_decisions_of_the_start_are_for_debugging(pretrain: Callable, corpus: Path) -> None:
    run = [*FLAGS, "--data-path", corpus, "--train-iters", 1, "--eval-iters", 0]
    details = ("torch.compile: ", "peak per device: ", "memory (MB)", "buckets ", "needed: 8 samples")
    usual, debug = pretrain(*run), pretrain(*run, "--log-level", "debug")
    assert [text for text in details if text in usual] == []
    assert [text for text in details if text not in debug] == []


def test_megatron_format_of_a_run(pretrain: Callable, corpus: Path) -> None:
    out = pretrain(*FLAGS, "--data-path", corpus, "--log-format", "megatron")
    assert (
        len(re.findall(r"^ iteration +\d+/      20 \| .* number of nan iterations:   0 \|$", out, re.M)) == 20
    )
    assert "\n validation loss at iteration 10 | lm loss value: " in out
    assert "\n validation loss at the end of training for test data | lm loss value: " in out
