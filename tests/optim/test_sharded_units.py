"""Sharded gradients and parameters: their bytes by formula, and the losses of torch's `fully_shard`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed import run_distributed
from models import CPU, config_of, engine_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megatron.data.gpt_dataset import GPTBatch
from megatron.model.context import ModelContext
from megatron.model.gpt import GPTModel
from megatron.optim.units import units_of
from megatron.parallel.mesh import Mesh, init_mesh
from megatron.parallel.parameters import named_parameters
from megatron.planner.dry_run import DryRun
from megatron.pretrain_gpt import GPT

STRATEGY = "--data-parallel-sharding-strategy"
# All sizes are multiples of 64 x 4 elements, so that no bucket is padded.
LLAMA = """
    --num-layers 4 --hidden-size 256 --ffn-hidden-size 512 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --bf16
"""
LAYER = 4 * 256**2 + 3 * 256 * 512 + 2 * 256
TABLE = 128 * 256
PARAMETERS = 4 * LAYER + 2 * TABLE + 256


@pytest.mark.parametrize(
    ("ranks", "recompute"),
    [(4, ""), *(pytest.param(n, "--recompute-granularity full", marks=pytest.mark.slow) for n in (2, 4))],
)
def test_bytes_by_formula(ranks: int, recompute: str) -> None:
    """With three microbatches. Parameters have 2 bytes, gradients 4."""
    costs = {}
    for strategy in ("optim", "optim_grads", "optim_grads_params"):
        flags = f"{LLAMA} {recompute} {STRATEGY} {strategy} --overlap-grad-reduce --overlap-param-gather"
        config = config_of(f"{flags} --global-batch-size {3 * ranks}")
        costs[strategy] = DryRun.from_config(config, GPT, ranks).count(0)
    n, axis = PARAMETERS, "data-parallel"
    gathered = {"optim": 2 * n, "optim_grads": 2 * n, "optim_grads_params": 3 * 2 * (n + 4 * LAYER)}
    for strategy, cost in costs.items():
        assert cost.traffic["all-gather", axis].bytes == gathered[strategy]
        times = 1 if strategy == "optim" else 3
        assert cost.traffic["reduce-scatter", axis].bytes == times * 4 * n
    grads, params = costs["optim_grads"].memory, costs["optim_grads_params"].memory
    assert grads["weights"] == 2 * n and grads["gradients"] == params["gradients"] == 4 * n // ranks
    assert params["weights"] == 2 * n // ranks
    assert params["master weights"] == 4 * n // ranks and params["moments"] == 8 * n // ranks
    # In backward of the layers: two layers' gradients and parameters.
    working = {"optim_grads": 4 * 2 * LAYER, "optim_grads_params": 6 * 2 * LAYER}
    for strategy, more in working.items():
        assert costs[strategy].memory["activations"] <= 1.05 * (costs["optim"].memory["activations"] + more)


@pytest.mark.parametrize("strategy", ["optim", "optim_grads", "optim_grads_params"])
def test_bytes_of_instances_by_formula(strategy: str) -> None:
    """Two instances of two ranks, with three microbatches."""
    flags = f"{LLAMA} {STRATEGY} {strategy} --num-distributed-optimizer-instances 2 --global-batch-size 12"
    cost = DryRun.from_config(config_of(flags), GPT, 4).count(0)
    n, within = PARAMETERS, "data-parallel shard"
    gathered = 3 * 2 * (n + 4 * LAYER) if strategy == "optim_grads_params" else 2 * n
    assert cost.traffic["all-gather", within].bytes == gathered
    assert cost.traffic["reduce-scatter", within].bytes == (1 if strategy == "optim" else 3) * 4 * n
    assert cost.traffic["all-reduce", "data-parallel instance"].bytes == 4 * n // 2
    assert cost.memory["master weights"] == 4 * n // 2 and cost.memory["moments"] == 8 * n // 2
    assert cost.memory["gradients"] == (4 * n if strategy == "optim" else 4 * n // 2)


def test_units_of_a_model() -> None:
    config = config_of(LLAMA).model
    with torch.device("meta"):
        model = GPTModel(config, ModelContext(vocab_size=60, padded_vocab_size=64))
    assert [unit.kind for unit in units_of(model)] == ["embedding", *["layer"] * 4, "ends"]
    with torch.device("meta"):
        tied = GPTModel(config_of("").model, ModelContext(vocab_size=60, padded_vocab_size=64))
    assert [unit.kind for unit in units_of(tied)] == ["ends", *["layer"] * 4]


STEPS, LR = 4, 1e-3
COMMON = (
    f"--hidden-dropout 0 --attention-dropout 0 --clip-grad 0 --weight-decay 0 --global-batch-size 8 --lr {LR}"
)


def batches(rank: int) -> list[list[torch.Tensor]]:
    """Tokens of a rank's two microbatches, [2, 17], the same in each step."""
    generator = torch.Generator().manual_seed(rank)
    return [[torch.randint(60, (2, 17), generator=generator) for _ in range(2)]] * STEPS


def our_losses(mesh: Mesh, flags: str) -> list[float]:
    engine = engine_of(mesh, config_of(flags))
    positions, mask = torch.arange(16).expand(2, 16), torch.ones(2, 16)
    losses = []
    for step in batches(mesh.dp.rank):
        data = [
            GPTBatch(tokens=x[:, :-1], labels=x[:, 1:], loss_mask=mask, position_ids=positions) for x in step
        ]
        loss, _ = engine.train_step(
            iter(data), num_microbatches=2, consumed_samples=0, lr=LR, weight_decay=0.0
        )
        losses.append(loss.sum())
    total = torch.stack(losses)
    dist.all_reduce(total)
    return total.tolist()


def torch_losses(mesh: Mesh) -> list[float]:
    """Train the same model, sharded by torch."""
    engine = engine_of(mesh, config_of(COMMON))
    (model,) = engine.modules
    for module in model.modules():
        for name, p in list(named_parameters(module, recurse=False)):
            setattr(module, name, torch.nn.Parameter(p.detach().clone()))
    device_mesh = init_device_mesh("cpu", (mesh.dp.size,))
    for layer in model.decoder.layers.values():
        fully_shard(layer, mesh=device_mesh)
    fully_shard(model, mesh=device_mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    positions, losses = torch.arange(16).expand(2, 16), []
    for step in batches(mesh.dp.rank):
        total = torch.zeros(())
        for x in step:
            loss = model(x[:, :-1], positions, labels_bs=x[:, 1:]).mean() / 2
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total / mesh.dp.size)
    total = torch.stack(losses)
    dist.all_reduce(total)
    return total.tolist()


def both_losses(strategies: list[str]) -> list[list[float]]:
    with init_mesh(config_of("").parallel, CPU) as mesh:
        ours = [our_losses(mesh, f"{COMMON} {STRATEGY} {strategy}") for strategy in strategies]
        return [torch_losses(mesh), *ours]


def test_losses_of_fully_shard() -> None:
    strategies = ["optim_grads", "optim_grads_params --overlap-grad-reduce --overlap-param-gather"]
    torchs, *ours = run_distributed(both_losses, 2, strategies)[0]
    assert torchs[-1] < torchs[0]
    for losses in ours:
        assert losses == pytest.approx(torchs, rel=2e-6)


@pytest.mark.slow
def test_benchmark_against_fully_shard(command: Callable, tmp_path: Path) -> None:
    """It checks the losses. Ours passes no more bytes to collectives than torch's."""
    command("benchmarks/sharding.py", "--size", "tiny", "--rounds", 1, "--output", tmp_path / "sharding.json")
    sides = json.loads((tmp_path / "sharding.json").read_text())["sides"]
    ours, torchs = (sides[name]["bytes of collectives"] for name in ("optim_grads_params", "fully_shard"))
    for name in ("all-gather", "reduce-scatter"):
        assert ours[name] <= 1.01 * torchs[name], sides
