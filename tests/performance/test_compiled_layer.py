"""Transformer layers compiled as a whole, as on a GPU, against the same layers uncompiled, on a CPU."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from distributed import run_distributed
from models import config_of, engine_of, flat, position_ids
from torch import Tensor
from torch._dynamo.utils import counters

from megatron.faults.diagnosis import diagnose
from megatron.model.config import ModelConfig
from megatron.model.context import ModelContext
from megatron.model.gpt import GPTModel
from megatron.ops.backend import Ops, choose_ops
from megatron.ops.compiler import eager
from megatron.ops.config import OpsConfig
from megatron.ops.linear import fused_accumulate_wgrad
from megatron.optim.buffer import ParamBuffer
from megatron.parallel.mesh import init_mesh
from megatron.parallel.phases import Phases
from megatron.parallel.random import DropoutKey, dropout
from megatron.performance.compiled_layer import BLOCKS, device_keys, inductor_options, philox
from megatron.planner.dry_run import longest_batch
from megatron.pretrain_gpt import GPT
from megatron.training.build import build_model
from megatron.training.config import RunConfig
from megatron.training.engine import Engine

CPU = torch.device("cpu")
LAYERS = 3
LLAMA = {
    "swiglu": True,
    "ffn_hidden_size": 160,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "group_query_attention": True,
    "num_query_groups": 2,
    "add_bias_linear": False,
}
DEEPSEEK = {
    **LLAMA,
    "group_query_attention": False,
    "num_query_groups": None,
    "multi_latent_attention": True,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_head_dim": 12,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 10,
    "qk_layernorm": True,
}


def layer_ops(backend: str) -> Ops:
    """Operations of compiled layers, without generating code unless the backend is "inductor"."""

    @functools.cache
    def compiled(function: Callable) -> Callable:
        options = inductor_options() if backend == "inductor" else None
        return torch.compile(function, backend=backend, fullgraph=True, options=options)

    def run(function: Callable, *arguments: Any) -> Any:
        return compiled(function)(*arguments)

    return choose_ops(
        OpsConfig(ops_backend="layers"), work=1, dtype=torch.float32, device=CPU, find=lambda _: (run, "")
    )


def model_of(ops: Ops, fields: dict[str, Any]) -> tuple[GPTModel, ParamBuffer]:
    shape: dict[str, Any] = {"num_layers": LAYERS, "hidden_size": 64, "num_attention_heads": 4}
    config = ModelConfig(
        **shape, max_position_embeddings=32, attention_dropout=0.0, hidden_dropout=0.1, **fields
    )
    model = GPTModel(config, ModelContext(vocab_size=100, padded_vocab_size=100, ops=ops))
    buffer = flat(model)
    buffer.initialize(1)
    return model, buffer


def two_passes(ops: Ops, fields: dict[str, Any]) -> tuple[list[float], Tensor]:
    """Losses of two microbatches and the sum of their gradients."""
    model, buffer = model_of(ops, fields)
    samples = 2 * BLOCKS // 32  # so that the blocks divide the tokens
    tokens, labels = torch.randint(100, (2, samples, 32), generator=torch.Generator().manual_seed(0))
    losses = []
    for key in device_keys([DropoutKey(1, 0), DropoutKey(1, 2)], LAYERS, CPU):
        loss = model(tokens, position_ids(0, samples, 32, CPU), labels_bs=labels, dropout_key=key).mean()
        loss.backward()
        losses.append(loss.item())
    return losses, buffer.grads.clone()


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({}, id="GPT-2"),
        pytest.param(LLAMA, id="Llama", marks=pytest.mark.slow),
        pytest.param(DEEPSEEK, id="DeepSeek", marks=pytest.mark.slow),
    ],
)
def test_a_compiled_layer_equals_the_plain_one(fields: dict, backend: str) -> None:
    """Forward, gradients added to `main_grad`, and masks of dropout; compiled once for all layers."""
    ops = layer_ops(backend)
    torch.compiler.reset()
    counters.clear()
    losses, grads = two_passes(ops, fields)
    # A layer, dropout after the embedding, and the two functions of the loss.
    assert counters["stats"]["unique_graphs"] == 4
    plain_losses, plain_grads = two_passes(dataclasses.replace(ops, run=eager), fields)
    assert losses == pytest.approx(plain_losses, rel=1e-6)
    assert losses[0] != losses[1]
    assert (grads - plain_grads).norm() < 1e-6 * plain_grads.norm()


def test_compiled_layers_without_gradients() -> None:
    """As in evaluations."""
    ops = layer_ops("aot_eager")
    torch.compiler.reset()
    tokens = torch.randint(100, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits, plain = (
            model_of(each, {})[0](tokens, position_ids(0, 2, 32, CPU))
            for each in (ops, dataclasses.replace(ops, run=eager))
        )
    torch.testing.assert_close(logits, plain)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((0, 0, 0), (0x257A3673, 0xCD26BE2A)),
        ((0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF), (0xAB302C4D, 0x3DC9D239)),
        ((0x243F6A88, 0x85A308D3, 0x13198A2E), (0xBEDBBE6B, 0xE4C770B3)),
    ],
)
def test_philox(words: tuple, expected: tuple) -> None:
    """Known answers of the Random123 library, philox2x32 with 7 rounds: counters and key to two words."""
    assert tuple(x.item() for x in philox(*map(torch.tensor, words))) == expected


def test_dropout_by_device_keys() -> None:
    """The mask depends on seed, sample, layer and site; parts of a sequence drop what the whole does."""
    x = torch.ones(64, 4, 32)

    def draw(seed: int = 1, sample: int = 0, layer: int = 0, site: str = "mlp") -> Tensor:
        (key,) = device_keys([DropoutKey(seed, sample)], LAYERS, CPU)
        return dropout(x, 0.25, key.at_layer(layer), site)

    first = draw()
    assert torch.equal(first, draw())
    others = [draw(seed=2), draw(sample=2), draw(layer=1), draw(site="attended")]
    assert not any(torch.equal(first, other) for other in others)
    assert first.unique().tolist() == pytest.approx([0.0, 4 / 3])
    kept = [(tensor != 0).float().mean().item() for tensor in (first, *others)]
    assert kept == pytest.approx([0.75] * 5, abs=0.02)
    (key,) = device_keys([DropoutKey(1, 0)], LAYERS, CPU)
    parts = [dropout(part, 0.25, key.at_layer(0), "mlp", rank) for rank, part in enumerate(x.chunk(2))]
    assert torch.equal(torch.cat(parts), first)


def test_the_registered_operation() -> None:
    """Adds a product in fp32 to a part of a larger buffer, and can be traced."""
    a, b, total = torch.randn(6, 5), torch.randn(5, 7), torch.ones(3, 6, 7)
    fused_accumulate_wgrad(total[1], a, b)
    torch.testing.assert_close(total[1], 1 + a @ b)
    assert bool((total[[0, 2]] == 1).all())
    torch.library.opcheck(torch.ops.megatron.accumulate_wgrad.default, (torch.ones(6, 7), a, b))


def test_diagnosis_names_a_module_of_a_compiled_layer() -> None:
    config = config_of("--ops-backend layers")
    with init_mesh(config.parallel, CPU) as mesh:
        sizes = {"vocab_size": 60, "padded_vocab_size": 64}
        model = build_model(config, GPT, mesh, layer_ops("eager"), **sizes)
        engine = Engine(config, GPT, mesh, model, Phases())
        engine.buffer.initialize(1)
        batches = iter(random_batches(config, torch.Generator().manual_seed(0)))
        batch = engine.next_global_batch(batches, 2, 0)
        engine.forward_backward(batch)
        assert diagnose(engine, batch).output is None
        path = "decoder.layers.1.mlp.linear_fc1"
        engine.modules[0].get_parameter(f"{path}.weight").data[0, 0] = torch.nan
        assert path in str(diagnose(engine, batch))


def train_two_steps(backend: str, flags: str) -> list[float]:
    config = config_of(f"{flags} --ops-backend {backend} --attention-dropout 0")
    with init_mesh(config.parallel, CPU) as mesh:
        engine = engine_of(mesh, config)
        losses = []
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            batches = iter(random_batches(config, generator))
            loss, _ = engine.train_step(
                batches, num_microbatches=2, consumed_samples=4 * step, lr=1e-3, weight_decay=0.1
            )
            losses.append(loss.item())
        return losses


def random_batches(config: RunConfig, generator: torch.Generator) -> list:
    """Two microbatches of random tokens, labels and positions, all less than the sequence's length."""
    batch = longest_batch(config, GPT, 59)
    draw = lambda x: torch.randint(16, x.shape, generator=generator) if x.dtype == torch.int64 else x  # noqa: E731
    return [batch.map(draw) for _ in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("sequence", ["", "--sequence-parallel"])
def test_compiled_layers_with_tensor_parallelism(sequence: str) -> None:
    """Each communication ends a graph. With overlapped gathers of parameters a layer waits as a whole."""
    flags = f"--hidden-dropout 0 --tensor-model-parallel-size 2 {sequence}"
    expected = run_distributed(train_two_steps, 2, "plain", flags)[0]
    assert run_distributed(train_two_steps, 2, "layers", flags)[0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("sequence", ["", "--sequence-parallel"])
def test_tensor_parallel_ranks_drop_what_one_process_does(sequence: str) -> None:
    flags = "--hidden-dropout 0.2"
    (expected,) = run_distributed(train_two_steps, 1, "layers", flags)
    split = f"{flags} --tensor-model-parallel-size 2 {sequence}"
    assert run_distributed(train_two_steps, 2, "layers", split)[0] == pytest.approx(expected, rel=1e-5)
