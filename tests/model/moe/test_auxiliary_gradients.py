"""Gradients of auxiliary losses depend on neither the microbatch size nor the layout."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from distributed import run_distributed
from models import CPU, config_of, engine_of

from megatron.data.gpt_dataset import GPTBatch
from megatron.parallel.mesh import init_mesh

SAMPLES = 4
FLAGS = """
    --disable-bias-linear --hidden-dropout 0 --attention-dropout 0 --init-method-std 0.1 --num-experts 8
    --moe-ffn-hidden-size 16 --moe-layer-freq 2 --moe-z-loss-coeff 0.01
    --moe-router-load-balancing-type seq_aux_loss global_aux_loss --moe-aux-loss-coeff 0.1 0.2
"""
ROUTERS = [f"decoder.layers.{layer}.mlp.router.{name}" for layer in (0, 2) for name in ("weight", "load")]


def batches(size: int, rank: int, replicas: int) -> Iterator[GPTBatch]:
    """Microbatches of a replica. No position counts in the loss of the language model."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(59, (SAMPLES, 17), generator=generator)
    for part in tokens.split(size)[rank::replicas]:
        yield GPTBatch(
            tokens=part[:, :-1],
            labels=part[:, 1:],
            loss_mask=torch.zeros(len(part), 16),
            position_ids=torch.arange(16).expand(len(part), 16),
        )


def gradients(size: int, flags: str) -> dict[str, list[float]]:
    """Gradients of a step after one without learning, which counts the load; by parameter."""
    config = config_of(f"{FLAGS} --micro-batch-size {size} {flags}")
    with init_mesh(config.parallel, CPU) as mesh:
        engine, dp = engine_of(mesh, config), mesh.dp
        count = SAMPLES // size // dp.size

        def part() -> Iterator[GPTBatch]:
            return batches(size, dp.rank, dp.size)

        engine.train_step(part(), num_microbatches=count, consumed_samples=0, lr=0.0, weight_decay=0.0)
        engine.forward_backward(engine.next_global_batch(part(), count, SAMPLES))
        engine.reduce_gradients()
        flat, buffer = engine.buffer.grads, engine.buffer
        return {param.name: param.view(flat).flatten().tolist() for param in buffer.flat_params}


def assert_same(found: dict[str, list[float]], expected: dict[str, list[float]], names: list[str]) -> None:
    for name in names:
        one, other = torch.tensor(expected[name]), torch.tensor(found[name])
        assert one.norm() > 0, name
        assert (one - other).norm() <= 1e-6 * one.norm(), name


def test_gradients_do_not_depend_on_the_microbatch_size() -> None:
    whole = gradients(4, "")
    names = [name for name, values in whole.items() if any(values)]
    assert set(ROUTERS) < set(names) and "embedding.word_embeddings.weight" in names
    for size in (1, 2):
        assert_same(gradients(size, ""), whole, names)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "flags"),
    [
        (2, "--expert-model-parallel-size 2"),
        (2, "--tensor-model-parallel-size 2 --expert-model-parallel-size 2 --expert-tensor-parallel-size 1"),
        (4, "--tensor-model-parallel-size 2 --expert-model-parallel-size 2 --sequence-parallel"),
    ],
)
@pytest.mark.parametrize("size", [1, 2])
def test_gradients_do_not_depend_on_the_layout(processes: int, flags: str, size: int) -> None:
    whole = gradients(4, "")
    for found in run_distributed(gradients, processes, size, flags):
        assert_same(found, whole, ROUTERS)
