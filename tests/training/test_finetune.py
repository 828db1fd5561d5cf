"""tools/finetune_bert.py, run as a user does."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from classification import write_mnli, write_qqp, write_race, write_tsv, write_vocab

from megatron.checkpoint.find import find_checkpoint
from megatron.flags import InputError
from tools.finetune_bert import main

SIZES = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 32"
FLAGS = "--seq-length 32 --micro-batch-size 8 --global-batch-size 16 --device cpu --num-workers 0 --log-interval 50"
RECIPE = "--lr 3e-3 --lr-warmup-fraction 0.1 --init-method-std 0.1 --attention-dropout 0 --hidden-dropout 0"


def metrics(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def untimed(rows: list[dict]) -> list[dict]:
    timed = ("seconds per iteration", "tokens per second", "TFLOP/s per device")
    return [{name: value for name, value in row.items() if name not in timed} for row in rows]


def accuracies(path: Path, name: str) -> list[float]:
    return [row[f"accuracy {name}"] for row in metrics(path) if f"accuracy {name}" in row]


@pytest.mark.parametrize(("task", "epochs"), [("MNLI", 3), ("QQP", 6), ("RACE", 3)])
def test_a_rule_is_learned(
    tmp_path: Path, task: str, epochs: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """From random weights; in the formats of the real data sets."""
    write = {"MNLI": write_mnli, "QQP": write_qqp, "RACE": write_race}[task]
    train, valid = write(tmp_path / "train.tsv", 3200, 1), write(tmp_path / "dev.tsv", 200, 2)
    other = write(tmp_path / "dev2.tsv", 100, 3)
    vocab = write_vocab(tmp_path / "vocab.txt")
    flags = f"""
        --task {task} --train-data {train} --valid-data {valid} {other} --vocab-file {vocab} --epochs {epochs}
        {SIZES} {FLAGS} {RECIPE} --metrics-path {tmp_path}/metrics.jsonl --save {tmp_path}/out
    """
    assert main(flags.split()) == 0
    out = capsys.readouterr().out
    reached = accuracies(tmp_path / "metrics.jsonl", "dev.tsv")
    assert len(reached) == epochs and reached[-1] >= 0.95
    told = re.findall(
        r"accuracy after epoch (\d) \| dev.tsv (\S+) \((\d+) of 200\) \| dev2.tsv \S+ \(\d+ of 100\)", out
    )
    assert [(int(n), float(x)) for n, x, _ in told] == [(i + 1, round(x, 4)) for i, x in enumerate(reached)]
    best = json.loads((tmp_path / "out" / "best.json").read_text())
    every = (
        accuracies(tmp_path / "metrics.jsonl", "dev.tsv"),
        accuracies(tmp_path / "metrics.jsonl", "dev2.tsv"),
    )
    overall = [(200 * a + 100 * b) / 300 for a, b in zip(*every, strict=True)]
    assert best == {
        "iteration": 200 * (overall.index(max(overall)) + 1),
        "accuracy": pytest.approx(max(overall)),
    }
    kept = find_checkpoint(str(tmp_path / "out" / "best"), None, verify=True)
    assert kept.iteration == best["iteration"] and kept.state["task"] == f"BERT fine-tuned on {task}"


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A checkpoint of pretraining on four processes."""
    folder = tmp_path_factory.mktemp("pretrained")
    vocab = write_vocab(folder / "vocab.txt")
    command = request.getfixturevalue("command")
    flags = f"""
        {SIZES} --tokenizer-type BertWordPieceLowerCase --vocab-file {vocab} --mock-data --seq-length 32
        --micro-batch-size 4 --train-iters 2 --lr 1e-3 --eval-iters 0 --device cpu --num-workers 0
        --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --save {folder}/checkpoints
    """
    command("pretrain_bert.py", *flags.split(), replicas=4)
    return folder


def test_begins_with_pretraining_in_any_layout_and_goes_on_where_it_stopped(
    pretrained: Path, tmp_path: Path, command, capsys: pytest.CaptureFixture[str]
) -> None:
    train, valid = write_mnli(tmp_path / "train.tsv", 200, 1), write_mnli(tmp_path / "dev.tsv", 50, 2)

    def flags(name: str, more: str = "") -> list[str]:
        return f"""
            --task MNLI --train-data {train} --valid-data {valid} --load {pretrained}/checkpoints --epochs 3 {FLAGS}
            --lr 1e-3 --log-interval 1 --metrics-path {tmp_path}/{name}.jsonl --save {tmp_path}/{name} {more}
        """.split()

    assert main(flags("one")) == 0
    out = capsys.readouterr().out
    assert "not used: binary_head, lm_head.dense, lm_head.layer_norm, output_layer; begun at random: " in out
    assert "begun at random: classification_head" in out
    whole = metrics(tmp_path / "one.jsonl")
    # Stopped within the second epoch; then the same command again.
    assert main(flags("two", "--exit-interval 17")) == 0
    assert main(flags("two")) == 0
    assert main(flags("two")) == 0  # there is nothing left to do
    assert untimed(metrics(tmp_path / "two.jsonl")) == untimed(whole)
    # In another layout the same but for rounding, and for dropout where a replica's batches are others.
    layout = "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2"
    command("tools/finetune_bert.py", *flags("four", layout), replicas=4)
    for row, other in zip(metrics(tmp_path / "four.jsonl"), whole, strict=True):
        assert row.keys() == other.keys()
        if "loss" in row and row["iteration"] == 1:
            assert row["loss"] == pytest.approx(other["loss"], rel=0.2)


def test_layouts_agree_without_dropout(pretrained: Path, tmp_path: Path, command) -> None:
    train, valid = write_race(tmp_path / "train", 64, 1), write_race(tmp_path / "dev", 20, 2)
    found = {}
    for name, processes, layout in (
        ("one", 1, ""),
        ("T2+SP", 2, "--tensor-model-parallel-size 2 --sequence-parallel"),
        ("P2", 2, "--pipeline-model-parallel-size 2"),
        ("D2", 2, "--use-distributed-optimizer"),
    ):
        flags = f"""
            --task RACE --train-data {train} --valid-data {valid} --load {pretrained}/checkpoints --epochs 1 {FLAGS}
            {RECIPE} --log-interval 1 --metrics-path {tmp_path}/{name}.jsonl --save {tmp_path}/{name} {layout}
        """
        command("tools/finetune_bert.py", *flags.split(), replicas=processes)
        rows = metrics(tmp_path / f"{name}.jsonl")
        found[name] = [row[key] for row in rows for key in ("loss", "grad norm", "loss dev") if key in row]
    for losses in found.values():
        assert losses == pytest.approx(found["one"], rel=1e-5, abs=1e-5)


def test_what_is_wrong_is_told(tmp_path: Path, pretrained: Path) -> None:
    good = write_mnli(tmp_path / "good.tsv", 20, 1)
    bad = write_tsv(tmp_path / "bad.tsv", ["sentence1", "sentence2", "gold_label"], [{"gold_label": "maybe"}])
    base = f"--load {pretrained}/checkpoints --lr 1e-3 {FLAGS} --task MNLI"
    for flags, message in (
        (f"{base} --train-data {good}", r"--valid-data is required"),
        (f"{base} --train-data {bad} --valid-data {good}", r"bad.tsv:2: gold_label is 'maybe'"),
        (f"{base} --train-data {good} --valid-data {tmp_path}", r"cannot be read \(Is a directory\)"),
        (f"{base} --train-data {good} --valid-data {good} {good}", "names a file twice"),
        (
            f"{base} --train-data {good} --valid-data {good} --global-batch-size 32",
            "holds 20 examples, less than",
        ),
        (
            f"{base} --train-data {good} --valid-data {good} --train-iters 5",
            "--train-iters is not a flag of this",
        ),
        (
            f"{base} --train-data {good} --valid-data {good} --num-layers 3",
            None,
        ),  # the checkpoint has the last word
    ):
        if message is None:
            assert main([*flags.split(), "--epochs", "1"]) == 0
            continue
        with pytest.raises(InputError, match=message):
            main(flags.split())
