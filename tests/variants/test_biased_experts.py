"""Experts and routers with biases. tests/interop compares gpt-oss with transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from distributed import run_distributed
from models import CPU, config_of

from megatron.arguments import parse_run_config
from megatron.errors import InputError
from megatron.model.context import ModelContext
from megatron.model.gpt import GPTModel
from megatron.parallel.mesh import ALONE, Mesh
from megatron.plugins import run
from megatron.pretrain_gpt import DEFAULTS, GPT
from megatron.training.build import build_engine
from megatron.variants.activations import quick_geglu
from megatron.variants.biased_experts import BiasedExperts, BiasedRouter

MIXTURE = """
    --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 --disable-bias-linear --add-expert-bias
    --activation-function quick_geglu --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.2
"""


@pytest.mark.parametrize("flags", ["", "--moe-grouped-gemm"])
def test_experts_equal_the_definition(flags: str) -> None:
    """Outputs and gradients of biases in fp64, each token by each of its experts."""
    engine = build_engine(
        config_of(f"{MIXTURE} {flags}"), GPT, Mesh(device=CPU), vocab_size=60, padded_vocab_size=60
    )
    engine.buffer.initialize(1)
    (model,) = engine.model.modules
    assert isinstance(model, GPTModel)
    layer = model.decoder.layers["0"].mlp
    experts, router = layer.experts, layer.router
    assert isinstance(experts, BiasedExperts) and isinstance(router, BiasedRouter)
    generator = torch.Generator().manual_seed(0)
    for bias in (experts.bias1, experts.bias2, router.bias):
        bias.data.normal_(generator=generator)
    x_sbh = torch.randn(5, 2, 32, generator=generator)
    out_sbh = layer(x_sbh)
    out_sbh.square().sum().backward()

    names = ("weight1", "bias1", "weight2", "bias2")
    weight1, bias1, weight2, bias2 = (
        getattr(experts, name).detach().double().requires_grad_() for name in names
    )
    gate, shift = (p.detach().double().requires_grad_() for p in (router.weight, router.bias))
    rows = []
    for x in x_sbh.double().flatten(0, 1):
        scores, chosen = (gate @ x + shift).topk(2)
        parts = []
        for e in chosen.tolist():
            hidden = weight1.view(4, 48, 32)[e] @ x + bias1.view(4, 48)[e]
            up = hidden[24:].clamp(-7, 7)
            left = hidden[:24].clamp(max=7)
            middle = left / (1 + torch.exp(-1.702 * left)) * (up + 1)
            parts.append(middle @ weight2.view(4, 24, 32)[e] + bias2.view(4, 32)[e])
        rows.append(scores.softmax(0) @ torch.stack(parts))
    expected = torch.stack(rows).view(5, 2, 32)
    torch.testing.assert_close(out_sbh.double(), expected, rtol=1e-5, atol=1e-5)
    expected.square().sum().backward()
    for ours, theirs in zip(
        (*(getattr(experts, name) for name in names), router.weight, router.bias),
        (weight1, bias1, weight2, bias2, gate, shift),
        strict=True,
    ):
        torch.testing.assert_close(ours.main_grad.double(), theirs.grad, rtol=1e-4, atol=1e-4)


def test_gradients_of_many_rows_accumulate_in_bf16() -> None:
    """Each row adds 1 to the gradient of the second bias: a sum in bf16 ends at 256."""
    config, rows = config_of(MIXTURE).model, 1024
    experts = BiasedExperts(config, ModelContext(vocab_size=60, padded_vocab_size=64, tp=ALONE)).bfloat16()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in experts.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / 4)
    x = torch.randn(1, 32, generator=generator).bfloat16()
    grads = []
    for copies in (1, rows):  # the gradient of equal rows is a multiple of that of one
        out = experts(x.repeat(copies, 1), torch.ones(copies), [copies, 0, 0, 0])
        biases = [experts.bias1, experts.bias2]
        grads.append([g.double() for g in torch.autograd.grad(out, biases, torch.ones_like(out))])
    assert grads[1][1].tolist() == [rows] * 32 + [0] * 96
    torch.testing.assert_close(grads[1][0], rows * grads[0][0], rtol=1e-2, atol=0)


def test_the_activation_is_clamped() -> None:
    x = torch.tensor([100.0, -100.0, 1.0, 100.0, -100.0, -1.0])  # three gates, three ups
    expected = torch.tensor([7 / (1 + torch.exp(torch.tensor(-1.702 * 7))) * 8, -0.0, 0.0])
    torch.testing.assert_close(quick_geglu(x), expected)


def test_a_dense_model_has_no_experts_with_biases() -> None:
    with pytest.raises(InputError, match="--add-expert-bias needs --num-experts"):
        config_of("--add-expert-bias")


RUN = f"""
    {MIXTURE} --mock-data --tokenizer-type NullTokenizer --vocab-size 59 --num-layers 2 --hidden-size 32
    --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 --global-batch-size 4 --train-iters 4 --lr 2e-2
    --device cpu --num-workers 0 --log-interval 1 --eval-iters 1
"""


def train(folder: str, flags: str) -> None:
    words = f"{RUN} {flags} --metrics-path {folder}/metrics.jsonl".split()
    assert run(parse_run_config(words, description="", defaults=DEFAULTS), GPT) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "flags"),
    [
        (2, "--tensor-model-parallel-size 2"),
        (2, "--tensor-model-parallel-size 2 --expert-model-parallel-size 2 --expert-tensor-parallel-size 1"),
        (2, "--expert-model-parallel-size 2 --use-distributed-optimizer"),
        (4, "--expert-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel"),
        (1, "--moe-grouped-gemm --moe-layer-recompute"),
        (1, "--moe-expert-capacity-factor 4 --moe-pad-expert-input-to-capacity"),
    ],
)
def test_layouts_train_alike(tmp_path: Path, processes: int, flags: str) -> None:
    records = []
    for count, given in ((1, ""), (processes, flags)):
        folder = tmp_path / f"{len(records)}"
        folder.mkdir()
        run_distributed(train, count, str(folder), given)
        records.append([json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()])
    assert len(records[0]) == len(records[1]) >= 5
    for one, other in zip(*records, strict=True):
        for key in one.keys() & {"lm loss", "lm loss validation", "grad norm"}:
            assert other[key] == pytest.approx(one[key], rel=1e-4)
