"""Loads of experts are summed exactly, and their vectors follow them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from distributed import run_distributed
from models import CPU, config_of, engine_of
from safetensors.torch import load_file

from megatron.checkpoint.config import CheckpointConfig
from megatron.checkpoint.save import Saver
from megatron.model.moe.router import Router
from megatron.parallel.mesh import init_mesh
from megatron.parallel.parameters import master

FLAGS = """
    --disable-bias-linear --num-layers 1 --num-experts 2 --moe-router-topk 1 --moe-router-score-function sigmoid
    --moe-router-enable-expert-bias --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.1
    --moe-router-bias-update-rate 0.3 --grad-reduce-in-bf16 --on-non-finite skip
"""
LOADS = ([1001.0, -1000.0], [-1000.0, 999.0])  # of two ranks


def stepped(flags: str, folder: str = "") -> dict[str, list[list[float]]]:
    """Values of the vectors, as the router reads them, and their state, after steps of which the second overflows.

    Args:
        folder: to save the weights in, if any.
    """
    config = config_of(f"{FLAGS} {flags}")
    with init_mesh(config.parallel, CPU) as mesh:
        engine = engine_of(mesh, config)
        buffer, found = engine.buffer, dict[str, list[list[float]]]()
        (router,) = (m for model in engine.model.modules for m in model.modules() if isinstance(m, Router))
        assert router.expert_bias is not None and router.load is not None

        for factor in (1.0, float("inf"), -1.0):
            for param in buffer.flat_params:
                if param.name.endswith(("expert_bias", "load")):
                    param.view(buffer.grads).copy_(torch.tensor(LOADS[mesh.dp.rank]))
                else:
                    param.view(buffer.grads).fill_(factor)
            engine.reduce_gradients()
            engine.optimizer.step(lr=0.0, weight_decay=0.0)
            for name, p in (("expert_bias", router.expert_bias), ("load", router.load)):
                assert master(p).dtype == torch.float32
                found.setdefault(name, []).append(master(p).tolist())
            for param, part, _ in buffer.parts(engine.optimizer.state["load"]):
                found.setdefault(f"state of {param.name.rpartition('.')[2]}", []).append(part.tolist())
        if folder:
            checkpoint = CheckpointConfig(save=folder)
            Saver(checkpoint, buffer, engine.optimizer, {}, log=lambda line: None).save({"iteration": 3})
        return found


@pytest.mark.parametrize(
    "flags", ["", pytest.param("--fp16", marks=pytest.mark.slow), "--bf16 --use-distributed-optimizer"]
)
def test_loads_are_exact(flags: str) -> None:
    """In bf16 the sums would be 0 and 0, and the bias -0.3008."""
    rate = torch.tensor(0.3)
    for found in run_distributed(stepped, 2, flags):
        # A step that is skipped changes no vector.
        biases = [torch.stack((-n * rate, n * rate)).tolist() for n in (1, 1, 2)]
        assert found["expert_bias"] == biases
        assert found["load"] == [[1.0, -1.0]] * 3
        assert found["state of expert_bias"] == [[1.0, -1.0]] * 3


def test_checkpoints_hold_the_bias_in_fp32(tmp_path: Path) -> None:
    found = stepped("--bf16", str(tmp_path))
    saved = load_file(next(tmp_path.glob("iter_*/model.safetensors")))
    (name,) = (name for name in saved if "expert_bias" in name)
    assert saved[name].dtype == torch.float32 and saved[name].tolist() == found["expert_bias"][-1]
    assert {t.dtype for n, t in saved.items() if "router.weight" in n} == {torch.bfloat16}
