"""Flags of FP8 products, without torchao."""

from __future__ import annotations

import sys
import types

import pytest
from models import config_of

from megatron.errors import InputError
from megatron.model.context import ModelContext
from megatron.model.gpt import GPTModel
from megatron.model.layers import ColumnParallelLinear
from megatron.parallel.mesh import Axis
from megatron.parallel.pipeline import WgradQueue
from megatron.performance.config import Fp8Config
from megatron.performance.fp8 import make_products, set_products

FP8 = "--fp8-format hybrid"
LATENT = "--multi-latent-attention --position-embedding-type rope"


def error_of(flags: str) -> str:
    with pytest.raises(InputError) as caught:
        config_of(flags)
    return str(caught.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (FP8, "--fp8-format: hybrid needs --bf16"),
        (f"{FP8} --fp16", "--fp8-format: hybrid needs --bf16"),
        ("--bf16 --fp8-format e5m2", "--fp8-format: 'e5m2' is not one of e4m3, hybrid"),
        *(
            (f"--bf16 {FP8} --fp8-recipe {name}", f"--fp8-recipe: {name} is not implemented; use tensorwise")
            for name in ("delayed", "mxfp8", "blockwise", "custom")
        ),
        (f"--bf16 {FP8} --hidden-size 40", "--hidden-size 40 is not a multiple of 16"),
        (f"--bf16 {FP8} --ffn-hidden-size 100", "--ffn-hidden-size 100 is not"),
        (
            f"--bf16 {FP8} --tensor-model-parallel-size 4",
            "times --kv-channels 8 on each tensor-parallel rank",
        ),
        (
            f"--bf16 {FP8} --group-query-attention --num-query-groups 1 --kv-channels 4",
            "queries, keys and values 24 is not a multiple",
        ),
        (f"--bf16 {FP8} {LATENT} --kv-lora-rank 40", "--kv-lora-rank 40 is not a multiple of 16"),
        (f"--bf16 {FP8} {LATENT} --v-head-dim 18", "keys and values 584 is not a multiple of 16"),
        (f"--bf16 {FP8} --capture x", "are known; verify and capture the run without --fp8-format"),
    ],
)
def test_flags_that_cannot_be(flags: str, message: str) -> None:
    assert message in error_of(flags) and "\n" not in error_of(flags)


def test_flags_without_effect(capsys: pytest.CaptureFixture[str]) -> None:
    config_of("--bf16 --fp8-recipe rowwise --num-layers-at-end-in-bf16 2")
    assert capsys.readouterr().err.splitlines() == [
        "note: --fp8-recipe has no effect without --fp8-format",
        "note: --num-layers-at-end-in-bf16 has no effect without --first-last-layers-bf16",
    ]


def test_without_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.performance.fp8_products", None)
    with pytest.raises(InputError, match=r"--fp8-format needs torchao.*: pip install 'torchao>=0.18'"):
        make_products(config_of(f"--bf16 {FP8}").plugin(Fp8Config), emulate=True)


def test_layers_in_bf16() -> None:
    edges = {"num_layers_at_start_in_bf16": 2, "num_layers_at_end_in_bf16": 1}
    assert Fp8Config(**edges).bf16_layers(8) == []
    assert Fp8Config(first_last_layers_bf16=True).bf16_layers(8) == [0, 7]
    assert Fp8Config(first_last_layers_bf16=True, **edges).bf16_layers(8) == [0, 1, 7]
    assert Fp8Config(first_last_layers_bf16=True, **edges).bf16_layers(2) == [0, 1]


def test_layers_communicate_as_before() -> None:
    """Some layers of latent attention do not communicate, though tensor parallelism splits the model."""
    config = config_of(f"--bf16 {FP8} {LATENT} --q-lora-rank 16 --tensor-model-parallel-size 2")
    context = ModelContext(vocab_size=60, padded_vocab_size=64, tp=Axis(rank=1, size=2))
    model = GPTModel(config.model, context)
    layers = [layer for layer in model.decoder.modules() if isinstance(layer, ColumnParallelLinear)]
    sizes = [layer.context.tp.size for layer in layers]
    products = types.SimpleNamespace(matmul=object(), dgrad=object(), accumulate_wgrad=lambda *_: None)
    stage = types.SimpleNamespace(context=context, modules=[model], wgrads=WgradQueue())
    set_products(config, stage, products)
    assert [layer.context.tp.size for layer in layers] == sizes and set(sizes) == {1, 2}
    assert all(layer.context.ops.matmul is products.matmul for layer in layers)
