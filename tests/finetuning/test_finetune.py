"""End-to-end runs of tools/finetune_bert.py."""

from __future__ import annotations

import errno
import json
import re
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from classification import write_mnli, write_qqp, write_race, write_tsv, write_vocab
from distributed import run_distributed
from models import config_of
from safetensors.torch import load_file

from megatron.checkpoint import save as save_module
from megatron.checkpoint.find import find_checkpoint
from megatron.checkpoint.storage import newest_iteration
from megatron.commands.finetune_bert import main
from megatron.errors import InputError, TrainingFault
from megatron.finetuning import finetune as finetune_module
from megatron.finetuning.classification import Example
from megatron.finetuning.finetune import FinetuneConfig
from megatron.parallel.parameters import normal
from megatron.parallel.slices import whole
from megatron.tokenizer.bert import BertWordPieceTokenizer

SIZES = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 32"
FLAGS = "--seq-length 32 --micro-batch-size 8 --global-batch-size 16 --device cpu --num-workers 0 --log-interval 50"
RECIPE = "--lr 3e-3 --lr-warmup-fraction 0.1 --init-method-std 0.1 --attention-dropout 0 --hidden-dropout 0"


def metrics(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def untimed(rows: list[dict]) -> list[dict]:
    timed = ("seconds per iteration", "tokens per second", "TFLOP/s per device", "mfu", "hfu")
    return [{name: value for name, value in row.items() if name not in timed} for row in rows]


def accuracies(path: Path, name: str) -> list[float]:
    return [row[f"accuracy {name}"] for row in metrics(path) if f"accuracy {name}" in row]


@pytest.mark.slow
@pytest.mark.parametrize(("task", "epochs"), [("MNLI", 3), ("QQP", 6), ("RACE", 3)])
def test_finetuning_learns_a_rule(
    tmp_path: Path, task: str, epochs: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Start from random weights, with data in the formats of the real datasets."""
    write = {"MNLI": write_mnli, "QQP": write_qqp, "RACE": write_race}[task]
    train, valid = write(tmp_path / "train.tsv", 3200, 1), write(tmp_path / "dev.tsv", 200, 2)
    other = write(tmp_path / "dev2.tsv", 100, 3)
    vocab = write_vocab(tmp_path / "vocab.txt")
    flags = f"""
        --task {task} --train-data {train} --valid-data {valid} {other} --vocab-file {vocab} --epochs {epochs}
        {SIZES} {FLAGS} {RECIPE} --metrics-path {tmp_path}/metrics.jsonl --save {tmp_path}/out
        --log-format megatron
    """
    assert main(flags.split()) == 0
    out = capsys.readouterr().out
    reached = accuracies(tmp_path / "metrics.jsonl", "dev.tsv")
    assert len(reached) == epochs and reached[-1] >= 0.95
    reported = re.findall(
        r"accuracy after epoch (\d) \| dev.tsv (\S+) \((\d+) of 200\) \| dev2.tsv \S+ \(\d+ of 100\)", out
    )
    assert [(int(n), float(x)) for n, x, _ in reported] == [
        (i + 1, round(x, 4)) for i, x in enumerate(reached)
    ]
    every = (
        accuracies(tmp_path / "metrics.jsonl", "dev.tsv"),
        accuracies(tmp_path / "metrics.jsonl", "dev2.tsv"),
    )
    overall = [(200 * a + 100 * b) / 300 for a, b in zip(*every, strict=True)]
    assert best_of(tmp_path / "out") == (200 * (overall.index(max(overall)) + 1), pytest.approx(max(overall)))
    kept = find_checkpoint(str(tmp_path / "out" / "best"), None)
    assert kept.state["task"] == f"BERT fine-tuned on {task}"


def best_of(folder: Path) -> tuple[int, float]:
    """Iteration and accuracy of the checkpoint kept as the best, of which there must be one."""
    (best,) = (folder / "best").glob("iter_*")
    assert newest_iteration(folder / "best") == int(best.name[5:])
    return int(best.name[5:]), json.loads((best / "accuracy.json").read_text())["all"]


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Checkpoint of pretraining with two processes."""
    folder = tmp_path_factory.mktemp("pretrained")
    vocab = write_vocab(folder / "vocab.txt")
    command = request.getfixturevalue("command")
    flags = f"""
        {SIZES} --tokenizer-type BertWordPieceLowerCase --vocab-file {vocab} --mock-data --seq-length 32
        --micro-batch-size 4 --train-iters 2 --lr 1e-3 --eval-iters 0 --device cpu --num-workers 0
        --tensor-model-parallel-size 2 --save {folder}/checkpoints
    """
    command("pretrain_bert.py", *flags.split(), replicas=2)
    return folder


def finetune_flags(tmp_path: Path, pretrained: Path, name: str, more: str = "") -> list[str]:
    """Flags for three epochs of 12 iterations from the pretrained model."""
    if not (tmp_path / "train.tsv").exists():
        write_mnli(tmp_path / "train.tsv", 200, 1)
        write_mnli(tmp_path / "dev.tsv", 50, 2)
    return f"""
        --task MNLI --train-data {tmp_path}/train.tsv --valid-data {tmp_path}/dev.tsv --load {pretrained}/checkpoints
        --epochs 3 {FLAGS} --lr 1e-3 --log-interval 1 --metrics-path {tmp_path}/{name}.jsonl --save {tmp_path}/{name}
        {more}
    """.split()


def test_resume(
    pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Resume within an epoch, at its end, and after an interrupted evaluation or copy of the best checkpoint."""
    assert main(finetune_flags(tmp_path, pretrained, "one")) == 0
    out = capsys.readouterr().out
    assert (
        "not used: binary_head, lm_head.dense, lm_head.layer_norm, output_layer; initialized at random: cl"
        in out
    )
    whole = untimed(metrics(tmp_path / "one.jsonl"))
    best = best_of(tmp_path / "one")

    for step in (7, 12):
        assert main(finetune_flags(tmp_path, pretrained, "two", f"--exit-interval {step}")) == 0
    assert not (tmp_path / "two" / "best").exists()
    for point in (
        "megatron.finetuning.finetune.EpochEvaluation._evaluate_files",
        "megatron.finetuning.finetune.keep_best",
    ):
        with monkeypatch.context() as patch:
            patch.setattr(point, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                main(finetune_flags(tmp_path, pretrained, "two"))
    (pretrained / "checkpoints").rename(pretrained / "elsewhere")  # no longer needed
    try:
        assert main(finetune_flags(tmp_path, pretrained, "two", "--exit-interval 25 --keep-last 1")) == 0
        assert main(finetune_flags(tmp_path, pretrained, "two")) == 0
    finally:
        (pretrained / "elsewhere").rename(pretrained / "checkpoints")
    found = {json.dumps(row, sort_keys=True) for row in untimed(metrics(tmp_path / "two.jsonl"))}
    assert found == {json.dumps(row, sort_keys=True) for row in whole}
    assert best_of(tmp_path / "two") == best
    capsys.readouterr()
    line = "--log-format megatron"
    assert main(finetune_flags(tmp_path, pretrained, "two", line)) == 0  # only evaluates
    flags = finetune_flags(tmp_path, pretrained, "two", f"--load {tmp_path}/two/best --epochs 0 {line}")
    save = flags.index("--save")
    assert main(flags[:save] + flags[save + 2 :]) == 0
    out = capsys.readouterr().out
    assert not re.search(r"iteration +\d+/", out)
    reported = re.findall(r"accuracy (after epoch 3|of \S+/two/best) \| dev.tsv (\S+)", out)
    assert [float(x) for _, x in reported] == [round(whole[-1]["accuracy"], 4), round(best[1], 4)]


def finetune(flags: list[str]) -> int:
    return main(flags)


@pytest.mark.parametrize(
    ("processes", "layout"),
    [
        (
            4,
            "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 "
            "--pipeline-model-parallel-layout auto",
        ),
        pytest.param(2, "--pipeline-model-parallel-size 2", marks=pytest.mark.slow),
        pytest.param(2, "--use-distributed-optimizer --overlap-param-gather", marks=pytest.mark.slow),
    ],
)
def test_layouts_agree(pretrained: Path, tmp_path: Path, processes: int, layout: str) -> None:
    """Start in one layout and resume in another, at a learning rate that does not amplify rounding errors."""
    train, valid = write_race(tmp_path / "train", 64, 1), write_race(tmp_path / "dev", 18, 2)
    losses = {}
    for name, parts in (("one", [(1, ""), (1, "")]), ("other", [(1, ""), (processes, layout)])):
        for (count, how), stop in zip(parts, ("--exit-interval 3", ""), strict=True):
            flags = f"""
                --task RACE --train-data {train} --valid-data {valid} --load {pretrained}/checkpoints --epochs 2
                {RECIPE} --lr 1e-3 {FLAGS} --log-interval 1 --metrics-path {tmp_path}/{name}.jsonl
                --save {tmp_path}/{name} {how} {stop}
            """
            run_distributed(finetune, count, flags.split())
        rows = metrics(tmp_path / f"{name}.jsonl")
        losses[name] = [row[key] for row in rows for key in ("loss", "grad norm", "loss dev") if key in row]
    assert losses["other"] == pytest.approx(losses["one"], rel=2e-5, abs=1e-5)


def finetune_on_a_full_disk(flags: list[str]) -> str:
    """The error of a run that cannot keep its best checkpoint."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finetune_module, "keep_best", no_space)
        with pytest.raises(TrainingFault) as fault:
            main(flags)
    return str(fault.value)


def no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_all_ranks_end_if_the_best_checkpoint_cannot_be_kept(pretrained: Path, tmp_path: Path) -> None:
    flags = finetune_flags(tmp_path, pretrained, "full", "--epochs 1")
    first, second = run_distributed(finetune_on_a_full_disk, 2, flags, timeout=60)
    assert "the best checkpoint cannot be kept" in first and ": [Errno 28] No space left" in first
    assert "the best checkpoint cannot be kept" in second and "rank 0: [Errno 28] No space left" in second


def test_the_best_checkpoint_is_one_that_has_been_written(
    pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save in the background takes longer than the evaluation."""
    write = save_module.write_pieces
    monkeypatch.setattr(save_module, "write_pieces", lambda *what: (time.sleep(0.3), write(*what))[1])
    evaluation = finetune_module.EpochEvaluation
    monkeypatch.setattr(evaluation, "_evaluate_files", lambda *_: {"all": 0.5})
    assert main(finetune_flags(tmp_path, pretrained, "x", "--epochs 1 --async-save")) == 0
    assert best_of(tmp_path / "x") == (12, 0.5)


def test_files_may_have_any_name(pretrained: Path, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    paths = [write_mnli(tmp_path / name, count, 1) for name, count in (("a/train", 20), ("train", 16))]
    main(
        f"""
        --task MNLI --train-data {paths[0]} --valid-data {paths[0]} {paths[1]} --load {pretrained}/checkpoints
        {FLAGS} --lr 1e-3 --epochs 1 --metrics-path {tmp_path}/metrics.jsonl
        """.split()
    )
    (row,) = (row for row in metrics(tmp_path / "metrics.jsonl") if "accuracy" in row)
    assert row.keys() >= {f"accuracy {path}" for path in paths}


def test_global_batch_size_is_fixed_on_resume(pretrained: Path, tmp_path: Path) -> None:
    """Also, new weights are those of --seed. The first run is one step, too small to change them."""
    flags = "--exit-interval 1 --seed 77 --lr 1e-30 --weight-decay 0"
    assert main(finetune_flags(tmp_path, pretrained, "x", flags)) == 0
    name, weight = "classification_head.weight", torch.empty(3, 32)
    normal(0.02)(weight, whole(3, 32), 77, name)
    saved = load_file(tmp_path / "x" / "iter_0000001" / "model.safetensors")
    assert torch.equal(saved[name], weight)
    with pytest.raises(InputError, match=r"--global-batch-size: 8, but the run in .* has 16"):
        main(finetune_flags(tmp_path, pretrained, "x", "--global-batch-size 8"))


def test_the_order_of_the_examples_follows_the_seed(tmp_path: Path) -> None:
    vocab = str(write_vocab(tmp_path / "vocab.txt"))
    examples = [Example((("tree", "tree"),), label) for label in range(40)]
    files = ("x.tsv",)
    finetune = FinetuneConfig(task="MNLI", train_data=files, valid_data=files, epochs=1)
    config = config_of("--seed 77 --global-batch-size 8 --eval-interval 5")
    task = finetune_module.finetune_task(finetune, finetune_module.Examples(examples, {}))
    train = task.build_datasets(config, BertWordPieceTokenizer(vocab, lowercase=True), (40, 0, 0))["train"]
    order = np.random.default_rng((77, 0)).permutation(40)
    assert [train[i][1] for i in range(40)] == order.tolist()


def test_invalid_flags_and_data(tmp_path: Path, pretrained: Path) -> None:
    good = write_mnli(tmp_path / "good.tsv", 20, 1)
    bad = write_tsv(tmp_path / "bad.tsv", ["sentence1", "sentence2", "gold_label"], [{"gold_label": "maybe"}])
    base = f"--load {pretrained}/checkpoints --lr 1e-3 {FLAGS} --task MNLI"
    for flags, message in (
        (
            f"{base} --train-data {good} --valid-data {good} --epochs 0 --save {tmp_path}/x",
            "--epochs: 0 evaluates",
        ),
        (f"{base} --train-data {good}", r"--valid-data is required"),
        (f"{base} --train-data {bad} --valid-data {good}", r"bad.tsv:2: gold_label is 'maybe'"),
        (f"{base} --train-data {good} --valid-data {tmp_path}", r"cannot be read \(Is a directory\)"),
        (f"{base} --train-data {good} --valid-data {good} {good}", "has a duplicate file"),
        (
            f"{base} --train-data {good} --valid-data {good} --global-batch-size 32",
            "has 20 examples, fewer than",
        ),
        (
            f"{base} --train-data {good} --valid-data {good} --train-iters 5",
            "--train-iters is not a flag of this",
        ),
        (
            f"{base} --train-data {good} --valid-data {good} --context-parallel-size 2",
            "--context-parallel-size: 2 is for the pretraining of GPT and BERT, not BERT fine-tuned on MNLI",
        ),
        (
            f"{base} --train-data {good} --valid-data {good} --num-layers 3",
            None,
        ),  # the checkpoint overrides the flag
    ):
        if message is None:
            assert main([*flags.split(), "--epochs", "1"]) == 0
            continue
        with pytest.raises(InputError, match=message):
            main(flags.split())
