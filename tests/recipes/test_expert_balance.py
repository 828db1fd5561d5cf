"""Loads of experts are summed exactly, and their vectors follow them."""

from __future__ import annotations

import torch
from distributed import run_distributed
from models import CPU, config_of, engine_of
from torch import Tensor

from megatron.parallel.mesh import init_mesh

FLAGS = """
    --disable-bias-linear --num-layers 1 --num-experts 2 --moe-router-topk 1 --moe-router-score-function sigmoid
    --moe-router-enable-expert-bias --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.1
    --moe-router-bias-update-rate 0.25 --grad-reduce-in-bf16 --on-non-finite skip
"""
LOADS = ([1001.0, -1000.0], [-1000.0, 999.0])  # of two ranks


def stepped(flags: str) -> dict[str, list[list[float]]]:
    """Values of the vectors, and their state, after steps of which the second overflows."""
    config = config_of(f"{FLAGS} {flags}")
    with init_mesh(config.parallel, CPU) as mesh:
        engine = engine_of(mesh, config)
        buffer, found = engine.buffer, dict[str, list[list[float]]]()

        def take(tensors: list[Tensor], prefix: str) -> None:
            for param, part, _ in buffer.parts(tensors):
                if "router." in param.name and "weight" not in param.name:
                    found.setdefault(prefix + param.name.rpartition(".")[2], []).append(part.tolist())

        for factor in (1.0, float("inf"), -1.0):
            for param in buffer.flat_params:
                if param.name.endswith(("expert_bias", "load")):
                    param.view(buffer.grads).copy_(torch.tensor(LOADS[mesh.dp.rank]))
                else:
                    param.view(buffer.grads).fill_(factor)
            engine.reduce_gradients()
            engine.optimizer.step(lr=0.0, weight_decay=0.0)
            take(buffer.masters, "")
            take(engine.optimizer.state["load"], "state of ")
        return found


def test_loads_are_exact() -> None:
    """In bf16 the sums would be 0 and 0."""
    for found in run_distributed(stepped, 2, ""):
        # A step that is skipped changes no vector.
        assert found["expert_bias"] == [[-0.25, 0.25], [-0.25, 0.25], [-0.5, 0.5]]
        assert found["load"] == [[1.0, -1.0]] * 3
        assert found["state of expert_bias"] == [[1.0, -1.0]] * 3
