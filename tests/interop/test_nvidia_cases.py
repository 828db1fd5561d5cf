"""Runs of Megatron-LM v2.5 in bf16 and with SGD, continued from the files that NVIDIA's own code wrote."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from nvidia import NO_TOKENIZER, edit, files, optimizer_of, weights, written

from megatron.errors import InputError
from megatron.interop.convert import write_native
from megatron.interop.nvidia.read import open_megatron
from megatron.interop.torch_file import StoredTensor, read_torch_file
from megatron.tokenizer.config import TokenizerConfig

TINY = TokenizerConfig(vocab_size=5000)
BF16_RUN = """
    --num-layers 2 --hidden-size 48 --num-attention-heads 6 --seq-length 32 --max-position-embeddings 32
    --init-method-std 0.05 --seed 808 --micro-batch-size 2 --global-batch-size 4 --train-iters 30 --lr 1e-3
    --min-lr 1e-4 --lr-decay-style linear --lr-warmup-fraction 0.1 --weight-decay 0.1 --clip-grad 1.0
    --adam-beta1 0.9 --adam-beta2 0.98 --adam-eps 1e-7 --no-bias-gelu-fusion --bf16 --split 90,8,2
""".split()
SGD_RUN = """
    --num-layers 3 --hidden-size 40 --num-attention-heads 5 --kv-channels 12 --ffn-hidden-size 100 --seq-length 40
    --max-position-embeddings 48 --init-method-xavier-uniform --seed 77 --layernorm-epsilon 1e-3
    --make-vocab-size-divisible-by 40 --apply-residual-connection-post-layernorm --no-bias-gelu-fusion --openai-gelu
    --optimizer sgd --sgd-momentum 0.8 --lr 0.05 --min-lr 0.001 --lr-decay-style linear --lr-warmup-iters 7
    --weight-decay 0.02 --clip-grad 0 --micro-batch-size 4 --global-batch-size 12 --train-iters 61
""".split()
HERE = """
    --attention-dropout 0 --hidden-dropout 0 --device cpu --no-mask-padded-vocab --log-interval 1 --eval-iters 0
""".split()


def continued(pretrain: Callable, shared: Path, folder: Path, native: Path, flags: list[str]) -> list[dict]:
    """Continue a run on the three corpora of the bf16 run; returns its records of iterations."""
    corpora = shared / "cases" / "gpt-v2.5-bf16" / "data"
    data = shared / "data"
    blend = [
        word for w, name in zip("523", "abc", strict=True) for word in (w, corpora / f"{name}_text_document")
    ]
    files = ["--vocab-file", data / "gpt2-tiny-vocab.json", "--merge-file", data / "gpt2-tiny-merges.txt"]
    metrics = folder / "metrics.jsonl"
    pretrain(
        *flags,
        *HERE,
        *("--data-path", *blend, "--data-cache-path", folder / "cache"),
        *files,
        *("--load", native, "--metrics-path", metrics),
    )
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [record for record in records if "grad norm" in record or "learning rate" in record]


def test_bf16_run_continues_as_in_nvidia_log(pretrain: Callable, shared: Path, tmp_path: Path) -> None:
    case = shared / "cases" / "gpt-v2.5-bf16"
    checkpoint = open_megatron(case / "at15", TINY)
    assert checkpoint.state["optimizer_steps"] == 15
    assert {name.split("/")[0] for name in checkpoint.tensors["optimizer"].index} == {
        "exp_avg",
        "exp_avg_sq",
        "master",
    }
    for name, weight in weights(checkpoint).items():
        assert torch.equal(weights(checkpoint, "optimizer")[f"master/{name}"].bfloat16(), weight.bfloat16())
    write_native(checkpoint, tmp_path / "native", lambda size: None)
    found = continued(pretrain, shared, tmp_path, tmp_path / "native", BF16_RUN)
    log = [json.loads(line) for line in (case / "log.jsonl").read_text().splitlines()]
    expected = [record for record in log if record.get("iteration", 0) > 15]
    assert [record["iteration"] for record in found] == list(range(16, 31))
    # bf16 has a relative precision of 2**-8; a loss averages 64 tokens' rounding errors.
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["consumed samples"] == theirs["consumed"]
        assert ours["learning rate"] == pytest.approx(theirs["lr"], rel=1e-6)
        assert ours["lm loss"] == pytest.approx(theirs["lm loss"], rel=1e-4)
        assert ours["grad norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)


def test_sgd_state_has_no_step(pretrain: Callable, shared: Path, tmp_path: Path) -> None:
    root = shared / "cases" / "gpt-v2.5-sgd" / "out_apex"
    checkpoint = open_megatron(root, TINY)
    assert checkpoint.state["optimizer_steps"] == checkpoint.iteration == 60
    moments = weights(checkpoint, "optimizer")
    assert {f"momentum_buffer/{name}" for name in weights(checkpoint)} == moments.keys()
    # Weights with decay come first: number 2 is the first layer's QKV projection, number 16 its bias.
    stored = read_torch_file(files(root)[0])["optimizer"]["state"]
    for number, name in {2: "weight", 16: "bias"}.items():
        theirs = stored[number]["momentum_buffer"]
        assert isinstance(theirs, StoredTensor) and theirs.read().abs().max() > 0
        assert torch.equal(
            moments[f"momentum_buffer/decoder.layers.0.self_attention.linear_qkv.{name}"], theirs.read()
        )
    write_native(checkpoint, tmp_path / "native", lambda size: None)
    (record,) = continued(pretrain, shared, tmp_path, tmp_path / "native", SGD_RUN)
    assert record["iteration"] == 61 and record["lm loss"] < 8.5


class Attributed(torch.Tensor):
    """A subclass of torch.Tensor, whose pickles name the class."""


@pytest.mark.parametrize("subclass", [False, True])
def test_tensors_with_attributes(tmp_path: Path, subclass: bool) -> None:
    """torch since 2.0 saves a tensor's attributes; those of plain tensors are read without them."""
    value = torch.arange(6.0).reshape(2, 3)
    if subclass:
        value = value.as_subclass(Attributed)
    value.partition_dim = 0  # type: ignore[attr-defined]
    torch.save({"x": value}, tmp_path / "x.pt")
    if subclass:
        with pytest.raises(InputError, match=r"x\.pt: holds .*Attributed, which no checkpoint needs"):
            read_torch_file(tmp_path / "x.pt")
    else:
        assert torch.equal(read_torch_file(tmp_path / "x.pt")["x"].read(), value)


def test_adam_without_steps_is_refused(tmp_path: Path) -> None:
    """Only SGD can do without them: Adam's bias correction depends on the number of steps."""
    root = written(tmp_path)

    def train(content: dict[str, Any]) -> None:
        content["optimizer"] = optimizer_of([content["model"]], half=False)
        for group in content["optimizer"]["param_groups"]:
            del group["step"]
        content["iteration"] = 12
        vars(content["args"]).update({"train_iters": 20, "global_batch_size": 8})
        content["lr_scheduler"] = {"max_lr": 1e-3, "min_lr": 0.0, "warmup_steps": 8, "decay_steps": 160}
        content["lr_scheduler"]["decay_style"] = "linear"

    edit(root, train)
    (root / "release").rename(root / "iter_0000012")
    (root / "latest_checkpointed_iteration.txt").write_text("12")
    with pytest.raises(InputError, match="its optimizer state is not that of"):
        open_megatron(root, NO_TOKENIZER)
