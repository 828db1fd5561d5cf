"""Whole runs of pretrain_gpt.py: resume, signals, replicas and errors."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import edit_state
from safetensors.torch import load_file

from megatron import plugins
from megatron.arguments import parse_run_config
from megatron.checkpoint.save import Saver
from megatron.commands import generate_text, preprocess_data
from megatron.commands.convert_checkpoint import main as convert_checkpoint
from megatron.data.indexed_writer import IndexedDatasetWriter
from megatron.errors import InputError
from megatron.inference.config import InferenceConfig
from megatron.inference.load import load_gpt
from megatron.parallel.mesh import Mesh
from megatron.parallel.parameters import normal
from megatron.parallel.slices import whole
from megatron.pretrain_gpt import GPT
from megatron.tokenizer.config import TokenizerConfig
from megatron.training.engine import Engine
from megatron.training.hooks import Evaluation
from megatron.training.loop import Hook, Trainer

ROOT = Path(__file__).resolve().parent.parent.parent
TINY = """
    --device cpu --mock-data --tokenizer-type NullTokenizer --vocab-size 300 --num-workers 0
    --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --micro-batch-size 2
    --global-batch-size 8 --train-iters 12 --lr 1e-2 --lr-warmup-iters 2 --weight-decay 0.1
    --log-interval 3 --eval-interval 6 --eval-iters 1
""".split()


def records(path: Path) -> list[dict]:
    """Metrics of a run, without timings."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    timed = ("seconds per iteration", "tokens per second", "TFLOP/s per device", "mfu", "hfu")
    return [{k: v for k, v in line.items() if k not in timed} for line in lines]


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.rglob("*.safetensors")}


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("precision", [[], ["--bf16"]], ids=["fp32", "bf16"])
def test_a_resumed_run_continues_bit_for_bit(pretrain, tmp_path: Path, precision: list[str]) -> None:
    """The run uses dropout and stops between two log lines."""
    whole = [*TINY, *precision, "--save", tmp_path / "a", "--metrics-path", tmp_path / "a.jsonl"]
    pretrain(*whole)
    parts = [*TINY, *precision, "--save", tmp_path / "b", "--load", tmp_path / "b"]
    parts += ["--metrics-path", tmp_path / "b.jsonl"]
    assert "holds no checkpoint yet" in pretrain(*parts, "--exit-interval", 5)
    assert "stopped after iteration 10 of 12" in pretrain(*parts, "--exit-interval", 5)
    pretrain(*parts)
    assert records(tmp_path / "a.jsonl") == records(tmp_path / "b.jsonl")
    assert files(tmp_path / "a" / "iter_0000012") == files(tmp_path / "b" / "iter_0000012")
    assert "nothing is left to train; raise --train-iters or another --train-... length" in pretrain(*parts)
    newest, older = (tmp_path / "b" / name for name in ("iter_0000012", "iter_0000010"))
    (newest / "optimizer.safetensors").unlink()
    warning = f"warning: skipped a damaged checkpoint: {newest}/optimizer.safetensors: is missing"
    output = pretrain(*parts)
    assert warning in output and f"; resuming from the older {older}\n" in output


RAMP = ["--train-samples", 72, "--rampup-batch-size", 4, 2, 24]


@pytest.mark.parametrize(
    "flags",
    [
        ["--exit-interval", 6],
        [*RAMP, "--exit-interval", 5],
        ["--dataloader-type", "cyclic", "--exit-interval", 6],
        ["--async-save", "--save-interval", 2, "--exit-interval", 5],
    ],
    ids=["where an evaluation is due", "ramp-up", "cyclic", "saving in the background"],
)
def test_a_resumed_run_continues_with_other_flags(pretrain, tmp_path: Path, flags: list) -> None:
    flags, exit_interval = flags[:-2], flags[-2:]
    base = TINY
    if "--train-samples" in flags:
        at = TINY.index("--train-iters")
        base = [*TINY[:at], *TINY[at + 2 :]]
        at = base.index("--lr-warmup-iters")
        base = [*base[:at], *base[at + 2 :]]
    pretrain(*base, *flags, "--save", tmp_path / "a", "--metrics-path", tmp_path / "a.jsonl")
    parts = [*base, *flags, "--save", tmp_path / "b", "--load", tmp_path / "b"]
    parts += ["--metrics-path", tmp_path / "b.jsonl"]
    while "stopped after" in pretrain(*parts, *exit_interval):
        pass
    assert records(tmp_path / "a.jsonl") == records(tmp_path / "b.jsonl")
    last = (tmp_path / "a" / "latest_checkpointed_iteration.txt").read_text()
    assert files(tmp_path / "a" / f"iter_{int(last):07d}") == files(tmp_path / "b" / f"iter_{int(last):07d}")


def test_rollback_to_an_earlier_checkpoint(pretrain, tmp_path: Path) -> None:
    run = [*TINY, "--save", tmp_path / "a", "--load", tmp_path / "a", "--metrics-path", tmp_path / "a.jsonl"]
    pretrain(*run, "--save-interval", 4)
    whole = records(tmp_path / "a.jsonl")
    other = ("--ckpt-step", 8, "--lr", 2e-2)
    pretrain(*run, *other, "--exit-interval", 10)
    assert (tmp_path / "a" / "latest_checkpointed_iteration.txt").read_text() == "10"
    assert sorted(path.name for path in (tmp_path / "a").glob("*iter_*") if path.is_dir()) == [
        "abandoned-iter_0000012-1",
        *(f"iter_{i:07d}" for i in (4, 8, 10)),
    ]
    # Restarting the same command continues from there.
    assert "iterations 11 to 12" in pretrain(*run, *other)
    assert records(tmp_path / "a.jsonl")[-1] != whole[-1]
    pretrain(*run, "--ckpt-step", 4)
    assert records(tmp_path / "a.jsonl") == whole
    assert (tmp_path / "a" / "abandoned-iter_0000012-2").is_dir()
    with pytest.raises(InputError) as wrong:
        pretrain(*run, "--ckpt-step", 5)
    assert str(wrong.value) == (
        f"--ckpt-step: {tmp_path / 'a'} holds no checkpoint of iteration 5; it holds 4, 12"
    )
    with pytest.raises(
        InputError, match=r"is one checkpoint of a run; give its parent folder, and --ckpt-step 4 if it"
    ):
        pretrain(*TINY, "--load", tmp_path / "a" / "iter_0000004", "--finetune")


def test_the_command_that_rolled_back_continues_without_that_checkpoint(pretrain, tmp_path: Path) -> None:
    """--use-checkpoint-args reads the checkpoint that the run continues from."""
    run = [*TINY, "--save", tmp_path / "a", "--load", tmp_path / "a"]
    pretrain(*run, "--save-interval", 4)
    again = [*run, "--ckpt-step", 4, "--use-checkpoint-args", "--keep-last", 1]
    pretrain(*again, "--exit-interval", 6)
    assert not (tmp_path / "a" / "iter_0000004").exists()
    assert "iterations 7 to 12" in pretrain(*again)


def test_a_change_of_the_batch_size(pretrain, tmp_path: Path) -> None:
    """With --train-iters the number of iterations stays, with --train-samples the number of samples."""
    run = [*TINY, "--save", tmp_path / "a", "--load", tmp_path / "a", "--metrics-path", tmp_path / "a.jsonl"]
    pretrain(*run, "--exit-interval", 6)
    line = "the run was started for 96 samples and extended to 144, which does not change the order of "
    assert line in pretrain(*run, "--global-batch-size", 16)
    assert records(tmp_path / "a.jsonl")[-1]["iteration"] == 12
    assert records(tmp_path / "a.jsonl")[-1]["consumed samples"] == 6 * 8 + 6 * 16

    at = TINY.index("--train-iters")
    samples = [*TINY[:at], "--train-samples", "96", *TINY[at + 2 :]]
    at = samples.index("--lr-warmup-iters")
    samples = [*samples[:at], *samples[at + 2 :]]
    run = [
        *samples,
        "--save",
        tmp_path / "b",
        "--load",
        tmp_path / "b",
        "--metrics-path",
        tmp_path / "b.jsonl",
    ]
    pretrain(*run, "--exit-interval", 6)
    assert "the order of the training data" not in pretrain(*run, "--global-batch-size", 16)
    assert records(tmp_path / "b.jsonl")[-1]["iteration"] == 9
    assert records(tmp_path / "b.jsonl")[-1]["consumed samples"] == 96


def test_a_run_killed_in_its_last_evaluation_repeats_it(pretrain, tmp_path, monkeypatch) -> None:
    run = [*TINY, "--save", tmp_path / "a", "--load", tmp_path / "a", "--metrics-path", tmp_path / "a.jsonl"]

    with monkeypatch.context() as patch:
        patch.setattr(Evaluation, "at_end", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pretrain(*run)
    assert "lm loss test" not in records(tmp_path / "a.jsonl")[-1]
    assert "12/12  test loss" in pretrain(*run)
    assert "lm loss test" in records(tmp_path / "a.jsonl")[-1]
    assert "test loss" not in pretrain(*run)


def test_an_interrupted_evaluation_is_repeated_for_another_folder(pretrain, tmp_path, monkeypatch) -> None:
    """The run has nothing left to train, so its own folder has no checkpoint to mark."""
    with monkeypatch.context() as patch:
        patch.setattr(Evaluation, "at_end", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pretrain(*TINY, "--save", tmp_path / "a")
    assert "12/12  test loss" in pretrain(*TINY, "--load", tmp_path / "a", "--save", tmp_path / "b")


def test_a_run_killed_after_its_last_evaluation_reports_it_once(pretrain, tmp_path, monkeypatch) -> None:
    run = [*TINY, "--save", tmp_path / "a", "--load", tmp_path / "a", "--metrics-path", tmp_path / "a.jsonl"]

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "mark_evaluated", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pretrain(*run)
    before = records(tmp_path / "a.jsonl")
    pretrain(*run)
    assert records(tmp_path / "a.jsonl") == before and "lm loss test" in before[-1]


def test_generate_text_from_a_run(command, pretrain, tmp_path: Path) -> None:
    pretrain(*TINY, "--save", tmp_path / "a")
    result = command("tools/generate_text.py", "--load", tmp_path / "a", "--prompt", "1 2 3", "--greedy")
    assert result.stdout.startswith("1 2 3 ") and len(result.stdout.split()) == 16
    with pytest.raises(InputError, match=r"^--load: \S+ is not a folder$"):
        generate_text.main(["--load", str(tmp_path / "b"), "--prompt", "1"])


@pytest.mark.parametrize(
    ("replicas", "number"),
    [
        pytest.param(1, signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(1, signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(2, signal.SIGINT, marks=pytest.mark.slow),
        (2, signal.SIGTERM),
    ],
)
def test_a_signal_saves_and_exits(command, tmp_path: Path, number: int, replicas: int) -> None:
    flags = [
        *TINY,
        "--train-iters",
        100000,
        "--lr-decay-iters",
        100,
        "--log-interval",
        1,
        "--eval-interval",
        9999,
    ]
    flags += [
        "--save",
        tmp_path / "run",
        "--load",
        tmp_path / "run",
        "--metrics-path",
        tmp_path / "metrics.jsonl",
    ]
    launch = ["-m", "torch.distributed.run", f"--nproc-per-node={replicas}"] if replicas > 1 else []
    process = subprocess.Popen(
        [sys.executable, *launch, "pretrain_gpt.py", *map(str, flags)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        deadline = time.monotonic() + 120
        metrics = tmp_path / "metrics.jsonl"
        while not metrics.exists() or metrics.stat().st_size < 1000:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert b"stopped after iteration" in output, errors.decode()
    if replicas == 1:
        assert process.returncode == 128 + number
        assert b"Traceback" not in errors
    else:
        assert process.returncode != 0
    stopped = int((tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text())
    seen = records(tmp_path / "metrics.jsonl")
    assert [r["iteration"] for r in seen] == list(range(1, stopped + 1))
    result = command("pretrain_gpt.py", *flags, "--exit-interval", stopped + 3, replicas=replicas)
    assert f"stopped after iteration {stopped + 3}" in result.stdout
    resumed = records(tmp_path / "metrics.jsonl")
    assert [r["iteration"] for r in resumed] == list(range(1, stopped + 4))


class Interrupt(Hook):
    """Sends SIGINT to the process after an iteration."""

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration

    def after_step(self, trainer: Trainer) -> None:
        if trainer.state.iteration == self.iteration:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(("iteration", "status"), [(10, 130), (11, 0), (12, 0)])
def test_a_signal_in_the_last_iteration_is_no_reason_to_run_again(
    iteration: int, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run of 12 iterations, which ends with the one after the signal, has done all that it was to do."""
    config = parse_run_config(TINY, description="", defaults={})
    assert plugins.run(config, GPT, [Interrupt(iteration)]) == status
    assert ("12/12  test loss" in capsys.readouterr().out) == (status == 0)


@pytest.mark.slow  # test_layouts.py compares all layouts with one process
def test_replicas_train_the_same_model(command, tmp_path: Path) -> None:
    """Dropout masks depend on the samples, not on the ranks."""
    for replicas in (1, 2, 4):
        command("pretrain_gpt.py", *TINY, "--metrics-path", tmp_path / f"{replicas}.jsonl", replicas=replicas)
    one = records(tmp_path / "1.jsonl")
    for replicas in (2, 4):
        for a, b in zip(one, records(tmp_path / f"{replicas}.jsonl"), strict=True):
            assert a.keys() == b.keys()
            for name in a:
                assert b[name] == pytest.approx(a[name], rel=1e-5), (replicas, a["iteration"], name)


def test_masked_losses_do_not_depend_on_the_layout(command, pretrain, tmp_path: Path) -> None:
    """With masked positions, microbatches have different numbers of tokens; the mean is over all tokens."""
    text = tmp_path / "text.jsonl"
    text.write_text(
        "".join(json.dumps({"text": " ".join(map(str, range(n % 23 + 1)))}) + "\n" for n in range(400))
    )
    tokenizer = ["--tokenizer-type", "NullTokenizer", "--vocab-size", 300]
    words = ["--input", text, "--output-prefix", tmp_path / "d", "--append-eod", *tokenizer]
    preprocess_data.main(list(map(str, words)))
    masks = ["--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss"]
    flags = [f for f in TINY if f != "--mock-data"] + [
        "--data-path",
        tmp_path / "d_text_document",
        "--split",
        "8,1,1",
        *masks,
    ]
    flags += ["--hidden-dropout", 0, "--attention-dropout", 0]
    found = []
    for micro, replicas in ((8, 1), (1, 1), (2, 2)):
        metrics = tmp_path / f"{micro}-{replicas}.jsonl"
        sizes = ["--micro-batch-size", micro, "--metrics-path", metrics]
        if replicas == 1:
            pretrain(*flags, *sizes)
        else:
            command("pretrain_gpt.py", *flags, *sizes, replicas=replicas)
        found.append([r["lm loss"] for r in records(metrics) if "lm loss" in r])
    assert len(found[0]) == 4
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert found[2] == pytest.approx(found[0], rel=1e-5)


def test_initial_weights_follow_the_seed(pretrain, tmp_path: Path) -> None:
    """The weights after a step too small to change them."""
    lr = "--lr 1e-30 --lr-warmup-iters 0 --weight-decay 0".split()
    pretrain(*TINY, *lr, "--train-iters", "1", "--seed", "77", "--save", tmp_path)
    name, weight = "decoder.layers.0.mlp.linear_fc1.weight", torch.empty(128, 32)
    normal(0.02)(weight, whole(128, 32), 77, name)
    assert torch.equal(load_file(tmp_path / "iter_0000001" / "model.safetensors")[name], weight)


def test_damage_is_found_wherever_a_checkpoint_is_read(pretrain, tmp_path: Path) -> None:
    run, iteration = tmp_path / "run", tmp_path / "run" / "iter_0000001"
    pretrain(*TINY, "--train-iters", "1", "--lr-warmup-iters", "0", "--save", run)
    load = ["--load", run, "--lr-warmup-iters", "0"]
    convert = ["--from", "native", "--to", "huggingface", "--load", str(run), "--save", str(tmp_path / "hf")]
    inference = InferenceConfig(load=str(run), device="cpu")

    def generate(config: InferenceConfig) -> None:
        load_gpt(config, TokenizerConfig(), Mesh(device=torch.device("cpu")))

    flip(iteration / "optimizer.safetensors")
    with pytest.raises(InputError, match=r"optimizer\.safetensors: is damaged"):
        pretrain(*TINY, *load, "--save", tmp_path / "other")
    pretrain(*TINY, *load, "--no-verify-checkpoint", "--save", tmp_path / "other")
    # Readers of weights leave the optimizer's file alone.
    pretrain(*TINY, *load, "--finetune", "--save", tmp_path / "finetuned")
    generate(inference)
    flip(iteration / "model.safetensors")
    for read in (
        lambda: pretrain(*TINY, *load, "--finetune"),
        lambda: pretrain(*TINY, *load, "--skip-train"),
        lambda: generate(inference),
        lambda: convert_checkpoint(convert),
    ):
        with pytest.raises(InputError, match=r"model\.safetensors: is damaged"):
            read()
    generate(dataclasses.replace(inference, verify_checkpoint=False))
    convert_checkpoint([*convert, "--no-verify-checkpoint"])


def flip(path: Path) -> None:
    """Flip the lowest bit of the last byte of a file."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_finetune_loads_only_the_weights(pretrain, tmp_path: Path) -> None:
    pretrain(*TINY, "--save", tmp_path / "a")
    result = pretrain(*TINY, "--load", tmp_path / "a", "--finetune", "--metrics-path", tmp_path / "m.jsonl")
    assert "iterations 1 to 12" in result
    pretrain(*TINY, "--metrics-path", tmp_path / "scratch.jsonl")
    finetuned, scratch = records(tmp_path / "m.jsonl"), records(tmp_path / "scratch.jsonl")
    assert finetuned[0]["lm loss"] < scratch[0]["lm loss"] - 0.1


MODEL_FLAGS = (
    "--num-layers --hidden-size --num-attention-heads --seq-length --tokenizer-type --vocab-size".split()
)


def test_a_run_continues_with_the_arguments_of_its_checkpoint(pretrain, tmp_path: Path, capsys) -> None:
    """Architecture, dropout and tokenizer are the checkpoint's; flags that may change can be given again."""
    own = [*TINY, "--hidden-dropout", 0.3, "--swiglu", "--position-embedding-type", "rope"]
    run = ["--save", tmp_path / "a", "--load", tmp_path / "a", "--metrics-path", tmp_path / "a.jsonl"]
    pretrain(*own, *run, "--exit-interval", 6, "--use-checkpoint-args")  # an empty folder has no arguments
    pretrain(*own, *run)
    run = ["--save", tmp_path / "b", "--load", tmp_path / "b", "--metrics-path", tmp_path / "b.jsonl"]
    pretrain(*own, *run, "--exit-interval", 6)
    bare = [
        f
        for name, f in zip(["", *TINY], TINY, strict=False)
        if f not in MODEL_FLAGS and name not in MODEL_FLAGS
    ]
    assert len(bare) == len(TINY) - 2 * len(MODEL_FLAGS)
    # The checkpoint's architecture overrides the command line, with a note.
    pretrain(*bare, *run, "--use-checkpoint-args", "--num-layers", 3, "--openai-gelu")
    assert records(tmp_path / "a.jsonl") == records(tmp_path / "b.jsonl")
    assert files(tmp_path / "a" / "iter_0000012") == files(tmp_path / "b" / "iter_0000012")
    config = parse_run_config(
        [*map(str, bare), "--load", str(tmp_path / "b"), "--use-checkpoint-args", "--finetune"]
        + ["--hidden-dropout", "0", "--seq-length", "32", "--num-layers", "3", "--vocab-size", "301"],
        description="",
        defaults={"tokenizer_type": "GPT2BPETokenizer"},
    )
    assert (config.model.num_layers, config.model.swiglu, config.model.hidden_dropout) == (2, True, 0)
    assert (config.data.seq_length, config.model.max_position_embeddings) == (32, 32)
    assert (config.tokenizer.tokenizer_type, config.tokenizer.vocab_size) == ("NullTokenizer", 301)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"note: --load: {tmp_path}/b/iter_0000012 gives --num-layers 2 --hidden")
    assert line.endswith("--swiglu --tokenizer-type NullTokenizer, in place of --num-layers 3")


def test_a_run_continues_with_the_tokenizer_of_its_checkpoint(pretrain, shared, tmp_path: Path) -> None:
    """The copies in the checkpoint suffice when the original files are gone, and later checkpoints have copies, too."""
    vocab, merges = (tmp_path / name for name in ("vocab.json", "merges.txt"))
    vocab.write_bytes((shared / "data" / "gpt2-tiny-vocab.json").read_bytes())
    merges.write_bytes((shared / "data" / "gpt2-tiny-merges.txt").read_bytes())
    at = TINY.index("--tokenizer-type")
    own = [*TINY[:at], *TINY[at + 4 :], "--save", tmp_path / "a", "--load", tmp_path / "a", "--keep-last", 1]
    copies = []
    for flags in (["--vocab-file", vocab, "--merge-file", merges], ["--use-checkpoint-args"]):
        pretrain(*own, *flags, "--exit-interval", 3, "--save-interval", 1)
        vocab.unlink(missing_ok=True)
        (folder,) = (tmp_path / "a").glob("iter_*/tokenizer")
        copies.append((folder / "vocab.json").read_bytes())
    assert folder.parent.name == "iter_0000006" and copies[0] == copies[1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--use-checkpoint-args needs --load"),
        (["--load", "/nowhere"], "--load: /nowhere is not a folder"),
        (["--load", "/proc"], "--load: /proc holds no checkpoint"),
    ],
)
def test_use_checkpoint_args_needs_a_checkpoint(pretrain, flags: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        pretrain(*TINY, "--use-checkpoint-args", *flags)
    assert "\n" not in str(caught.value)


def test_without_optimizer_state(pretrain, tmp_path: Path) -> None:
    """Weights and position are kept; Adam's moments start at zero."""
    run = [*TINY, "--save", tmp_path / "a", "--load", tmp_path / "a", "--metrics-path", tmp_path / "m.jsonl"]
    pretrain(*run)
    whole = records(tmp_path / "m.jsonl")
    run = [*TINY, "--save", tmp_path / "b", "--load", tmp_path / "b", "--metrics-path", tmp_path / "n.jsonl"]
    pretrain(*run, "--exit-interval", 6, "--no-save-optim")
    assert not list((tmp_path / "b" / "iter_0000006").glob("optimizer*"))
    assert "iterations 7 to 12" in pretrain(*run, "--no-load-optim")
    parts = records(tmp_path / "n.jsonl")
    assert parts[:2] == whole[:2]
    assert 0 < abs(parts[-1]["lm loss test"] - whole[-1]["lm loss test"]) < 0.2


def test_skip_train_evaluates_a_checkpoint(pretrain, tmp_path: Path) -> None:
    run = [*TINY, "--save", tmp_path / "a", "--metrics-path", tmp_path / "a.jsonl"]
    pretrain(*run)
    files = sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "a").rglob("*"))
    out = pretrain(*TINY, "--load", tmp_path / "a", "--skip-train", "--metrics-path", tmp_path / "b.jsonl")
    assert f"evaluation of {tmp_path / 'a'}, iteration 12; nothing is trained (--skip-train)" in out
    assert "12/12  validation loss " in out and "12/12  test loss " in out
    losses = {key: value for row in records(tmp_path / "b.jsonl") for key, value in row.items()}
    trained = {key: value for row in records(tmp_path / "a.jsonl") for key, value in row.items()}
    assert losses == {key: trained[key] for key in losses}
    assert sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "a").rglob("*")) == files
    with pytest.raises(InputError, match="--skip-train needs --load"):
        pretrain(*TINY, "--skip-train")


def test_a_run_without_save_is_noted(pretrain, tmp_path: Path) -> None:
    assert "without --save DIR no checkpoint of this run will be kept" in pretrain(*TINY)
    assert "no checkpoint of this run" not in pretrain(*TINY, "--save", tmp_path / "a")


def test_a_change_of_the_data_order_is_noted(pretrain, tmp_path: Path) -> None:
    run = [*TINY, "--save", tmp_path / "a", "--load", tmp_path / "a"]
    pretrain(*run, "--exit-interval", 3)
    result = pretrain(*run, "--exit-interval", 3, "--data-order", "head")
    assert (
        "the order of the training data may change from here on: --data-order changed from v2.5 to head"
        in result
    )
    assert "order of the training data" not in pretrain(*run, "--exit-interval", 3, "--data-order", "head")
    # Everything that the order depends on, as if the saving run had other values.
    folder = tmp_path / "a" / "iter_0000009"
    config = json.loads((folder / "state.json").read_text())["config"]
    changes = {"mock_data": False, "split": "1,1,1", "seq_length": 17, "dataloader_type": "cyclic"}
    changes |= {
        "data_path": ["1", "/a/b"],
        "train_data_path": ["/a/c"],
        "mask_prob": 0.3,
        "short_seq_prob": 0.5,
    }
    now = dict(config["data"])
    config["data"] |= changes
    config["training"]["seed"] = 7
    edit_state(folder, config=config)
    result = pretrain(*run, "--data-order", "head", "--exit-interval", 3)
    (line,) = (line for line in result.splitlines() if "order of the training data" in line)
    changed = {
        f"--{name.replace('_', '-')} changed from {before} to {now[name]}" for name, before in changes.items()
    }
    changed |= {"--seed changed from 7 to 1234"}
    assert all(change in line for change in changed), line
    assert line.count(" changed from ") == len(changed)


def test_a_change_of_operations_is_noted(pretrain, tmp_path: Path) -> None:
    run = [*TINY, "--save", tmp_path, "--load", tmp_path, "--exit-interval", 3]
    pretrain(*run)
    state = json.loads((tmp_path / "iter_0000003" / "state.json").read_text())
    before = ", ".join(state["operations"])
    assert before.endswith("torch.compile: off")
    assert "bit for bit" not in pretrain(*run)
    assert (
        f"{tmp_path / 'iter_0000006'} was computed with {before} and this run computes with plain PyTorch, so it does "
        "not continue bit for bit\n"
    ) in pretrain(*run, "--ops-backend", "plain")
    edit_state(tmp_path / "iter_0000009", operations=None)  # as in checkpoints before operations were saved
    assert "bit for bit" not in pretrain(*run)


def test_moved_data_is_the_same_data(pretrain, tmp_path: Path) -> None:
    no_mock_data = TINY[: TINY.index("--mock-data")] + TINY[TINY.index("--mock-data") + 1 :]
    folders = (tmp_path / "here", tmp_path / "there")
    for folder in folders:
        folder.mkdir()
        with IndexedDatasetWriter(str(folder / "corpus"), np.uint16) as writer:
            for i in range(200):
                writer.add_document([np.arange(i, i + 20) % 300])
    run = [
        *no_mock_data,
        "--eval-iters",
        0,
        "--save",
        tmp_path / "a",
        "--load",
        tmp_path / "a",
        "--exit-interval",
        3,
    ]
    outs = [pretrain(*run, "--data-path", folder / "corpus") for folder in folders]
    assert " 6/12 " in outs[1] and "order of the training data" not in outs[1]


def test_a_shortened_run_keeps_the_order_of_its_samples(pretrain, tmp_path: Path) -> None:
    """The order of real data depends on the number of requested samples; a resumed run keeps that of the first run."""
    with IndexedDatasetWriter(str(tmp_path / "corpus"), np.uint16) as writer:
        for i in range(50):
            writer.add_document([np.arange(i, i + 20) % 300])
    flags = [flag for flag in TINY if flag != "--mock-data"] + ["--data-path", tmp_path / "corpus"]
    flags += ["--eval-iters", 0, "--lr-decay-iters", 12, "--log-interval", 1]
    pretrain(*flags, "--metrics-path", tmp_path / "a.jsonl")
    parts = [
        *flags,
        "--save",
        tmp_path / "b",
        "--load",
        tmp_path / "b",
        "--metrics-path",
        tmp_path / "b.jsonl",
    ]
    pretrain(*parts, "--exit-interval", 2)
    assert "order of the training data" not in pretrain(*parts, "--train-iters", 5)
    assert records(tmp_path / "a.jsonl")[:5] == records(tmp_path / "b.jsonl")


def test_iteration_time_excludes_evaluation_and_saving(pretrain, tmp_path: Path, monkeypatch) -> None:
    clock, skipped = time.perf_counter, [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + skipped[0])

    def slow(function):
        def called(*args, **kwargs):
            skipped[0] += 1000
            return function(*args, **kwargs)

        return called

    monkeypatch.setattr(Engine, "evaluate", slow(Engine.evaluate))
    monkeypatch.setattr(Saver, "save", slow(Saver.save))
    flags = ["--save", tmp_path / "a", "--save-interval", 4, "--eval-interval", 4, "--log-interval", 2]
    pretrain(*TINY, *flags, "--metrics-path", tmp_path / "a.jsonl")
    assert skipped[0] >= 5000
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    seconds = [line["seconds per iteration"] for line in lines if "seconds per iteration" in line]
    assert len(seconds) == 6 and max(seconds) < 100


def test_a_change_of_the_schedule_is_noted(pretrain, tmp_path: Path) -> None:
    run = [*TINY, "--save", tmp_path / "a", "--load", tmp_path / "a"]
    pretrain(*run, "--exit-interval", 3)
    result = pretrain(*run, "--exit-interval", 3, "--lr", 2e-2)
    assert "(--lr changed from 0.01 to 0.02); using that of the command line" in result
    result = pretrain(*run, "--exit-interval", 3, "--use-checkpoint-opt_param-scheduler")
    assert "using that of the checkpoint" in result


def test_training_without_finite_gradients_stops(command, tmp_path: Path) -> None:
    flags = [
        *TINY,
        "--lr",
        1e30,
        "--clip-grad",
        0,
        "--lr-warmup-iters",
        0,
        "--optimizer",
        "sgd",
        "--eval-iters",
        0,
    ]
    skip = ("--on-non-finite", "skip", "--save", tmp_path / "a")
    result = command("pretrain_gpt.py", *flags, *skip, status=1)
    assert "  loss nan  " in result.stdout
    assert "Traceback" not in result.stderr
    assert result.stderr.startswith("error: iteration 11: no finite gradient for 10 iterations in a row")
    assert not list((tmp_path / "a").glob("iter_*"))
    result = command("pretrain_gpt.py", *flags, status=1)
    assert result.stderr.startswith(
        "error: iteration 2: the loss or its gradient is not finite; no weights were"
    )
    assert result.stderr.count("\n") == 1 and "first the output of " in result.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--load", "/nowhere"], "--load: /nowhere is not a folder"),
        (["--save", "/proc/nowhere"], "--save: /proc/nowhere"),
        (["--save", __file__], "--save: .* is not a directory"),
        (["--device", "cuda"], "--device cuda: torch finds no"),
        (["--micro-batch-size", "3"], "--global-batch-size"),
        (["--lr-warmup-iters", "12"], "--lr-warmup-iters"),
        (["--metrics-path", "/proc/nowhere/m"], "--metrics-path"),
        (["--tensorboard-dir", "/proc/nowhere/m"], "--tensorboard-dir"),
    ],
)
def test_bad_input(pretrain, flags: list[str], message: str) -> None:
    if flags == ["--device", "cuda"] and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(InputError, match=message) as caught:
        pretrain(*TINY, *flags)
    assert "\n" not in str(caught.value)


def test_wrong_input_is_one_line_and_status_2(command) -> None:
    result = command("pretrain_gpt.py", *TINY, "--load", "/nowhere", status=2)
    assert result.stderr == "error: --load: /nowhere is not a folder\n"


def test_nccl_needs_gpus(command) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    result = command("pretrain_gpt.py", *TINY, "--distributed-backend", "nccl", replicas=2, status=1)
    assert "error: --distributed-backend: nccl needs GPUs" in result.stderr


def test_an_existing_run_is_not_overwritten(pretrain, tmp_path: Path) -> None:
    pretrain(*TINY, "--save", tmp_path / "a", "--exit-interval", 2)
    before = files(tmp_path / "a")
    for extra in ([], ["--load", tmp_path / "a", "--finetune"]):
        with pytest.raises(InputError, match="already holds a run, at iteration 2"):
            pretrain(*TINY, "--save", tmp_path / "a", *extra)
    with pytest.raises(InputError, match=r"--num-layers \(checkpoint: 2, given: 3\)"):
        pretrain(*TINY, "--load", tmp_path / "a", "--num-layers", 3)
    with pytest.raises(InputError, match="vocabulary"):
        pretrain(*TINY, "--load", tmp_path / "a", "--vocab-size", 301)
    with pytest.raises(InputError, match=r"--max-position-embeddings \(checkpoint: 16, given: 8\)"):
        pretrain(*TINY, "--load", tmp_path / "a", "--seq-length", 8)
    assert files(tmp_path / "a") == before


def test_the_compiler_is_not_imported_where_nothing_is_compiled(command) -> None:
    """The import takes a second or two."""
    code = "import sys; from megatron import pretrain_gpt; pretrain_gpt.main(); print('torch._dynamo' in sys.modules)"
    assert command("-c", code, *TINY).stdout.splitlines()[-1] == "False"
