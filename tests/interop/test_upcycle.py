"""Upcycling: a mixture whose experts are copies of a dense MLP computes what the dense model does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hf_models import VOCAB, save_hf
from nvidia import weights

from megatron.checkpoint.checkpoint import model_config
from megatron.checkpoint.find import find_checkpoint
from megatron.commands.convert_checkpoint import main
from megatron.errors import InputError

EXPERTS = "--moe-use-upcycling --num-experts 4 --moe-router-topk 2"
DENSE = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --swiglu --disable-bias-linear --mock-data
    --init-method-std 0.2 --micro-batch-size 2 --lr 1e-3 --num-workers 0 --device cpu --attention-dropout 0
    --hidden-dropout 0 --tokenizer-type NullTokenizer --vocab-size 59
"""


def upcycle(source: str, target: str, load: Path, save: Path, flags: str = EXPERTS) -> None:
    main(["--from", source, "--to", target, "--load", str(load), "--save", str(save), *flags.split()])


def validation_loss(out: str) -> str:
    return out.split("validation loss ")[1].split()[0]


def test_the_loss_is_that_of_the_dense_model(tmp_path: Path, pretrain: Callable, capsys) -> None:
    dense, mixture = tmp_path / "dense", tmp_path / "mixture"
    pretrain(*DENSE.split(), "--train-iters", 2, "--eval-iters", 0, "--save", dense)
    upcycle(
        "native",
        "native",
        dense,
        mixture,
        f"{EXPERTS} --moe-layer-freq [0]*1+[1]*1 --moe-aux-loss-coeff 0.01",
    )
    assert "logits of the written checkpoint (read back by this program)" in capsys.readouterr().out
    before, after = (weights(find_checkpoint(str(folder), None)) for folder in (dense, mixture))
    mlp = "decoder.layers.1.mlp."
    assert after[f"{mlp}experts.weight1"].equal(before[f"{mlp}linear_fc1.weight"].repeat(4, 1))
    assert after[f"{mlp}experts.weight2"].equal(before[f"{mlp}linear_fc2.weight"].t().repeat(4, 1))
    assert after[f"{mlp}router.weight"].std().item() == pytest.approx(0.2, rel=0.2)
    assert before.keys() - after.keys() == {f"{mlp}linear_fc1.weight", f"{mlp}linear_fc2.weight"}
    flags = [
        *DENSE.split(),
        "--finetune",
        "--use-checkpoint-args",
        "--skip-train",
        "--train-iters",
        1,
        "--eval-iters",
        2,
    ]
    losses = [float(validation_loss(pretrain(*flags, "--load", folder))) for folder in (dense, mixture)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_from_and_to_other_formats(tmp_path: Path, capsys) -> None:
    """A Mistral in bf16 becomes a Mixtral, which transformers reads with the logits of the Mistral."""
    folder = save_hf(tmp_path / "theirs", "mistral", torch.bfloat16)
    upcycle("huggingface", "huggingface", folder, tmp_path / "mixtral")
    out = capsys.readouterr().out
    assert "logits of transformers from" in out
    upcycle(
        "huggingface", "native", folder, tmp_path / "sigmoid", f"{EXPERTS} --moe-router-topk-scaling-factor 2"
    )
    out = capsys.readouterr().out
    assert (
        "note: the weights of a token's experts do not sum to 1, so the model differs from the dense one"
        in out
    )
    assert "written to" in out
    found = find_checkpoint(str(tmp_path / "sigmoid"), None)
    assert model_config(found).num_experts == 4 and found.state["vocab_size"] == VOCAB


@pytest.mark.parametrize(
    ("kind", "flags", "message"),
    [
        ("mistral", "--moe-use-upcycling", "--moe-use-upcycling needs --num-experts"),
        ("mixtral", EXPERTS, "already has 4 experts"),
        ("gpt2", EXPERTS, "theirs have biases, which experts lack"),
        ("bert", EXPERTS, "holds a BERT, not a GPT"),
        (
            "mistral",
            f"{EXPERTS} --moe-ffn-hidden-size 80",
            "--moe-ffn-hidden-size: 80 is not the width of the dense",
        ),
        (
            "mistral",
            f"{EXPERTS} --moe-shared-expert-intermediate-size 80",
            "--moe-shared-expert-intermediate-size: the dense model has no shared expert",
        ),
        ("mistral", f"{EXPERTS} --num-layers 3", "the flags of tokenizer and model need --from megatron"),
        ("mistral", "--num-experts 4", "the flags of tokenizer and model need --from megatron"),
    ],
)
def test_impossible(tmp_path: Path, kind: str, flags: str, message: str) -> None:
    folder = save_hf(tmp_path / "theirs", kind)
    with pytest.raises(InputError, match=message):
        upcycle("huggingface", "native", folder, tmp_path / "mixture", flags)
    assert not (tmp_path / "mixture").exists()


def test_multi_token_prediction_is_refused(tmp_path: Path, pretrain: Callable) -> None:
    """The mixture would lack its layers."""
    dense, flags = (
        tmp_path / "dense",
        "--mtp-num-layers 1 --position-embedding-type rope --train-iters 1 --eval-iters 0",
    )
    pretrain(*DENSE.split(), *flags.split(), "--save", dense)
    with pytest.raises(
        InputError, match=r"multi-token prediction \(--mtp-num-layers 1\), which are not supp"
    ):
        upcycle("native", "native", dense, tmp_path / "mixture")
    assert not (tmp_path / "mixture").exists()
