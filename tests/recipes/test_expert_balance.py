"""Loads of experts are summed exactly, and their vectors follow them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from distributed import run_distributed
from models import CPU, config_of, engine_of
from safetensors.torch import load_file

from megatron.arguments import parse_run_config
from megatron.checkpoint.config import CheckpointConfig
from megatron.checkpoint.save import Saver
from megatron.model.moe.router import Router
from megatron.parallel.mesh import Mesh, init_mesh
from megatron.parallel.parameters import master
from megatron.plugins import run
from megatron.pretrain_gpt import DEFAULTS, GPT
from megatron.reports.params_norm import ParamsNorm

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
                values = master(p)
                assert values is not None and values.dtype == torch.float32
                found.setdefault(name, []).append(values.tolist())
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


def test_a_run_continues_with_another_balance(tmp_path: Path) -> None:
    """The load of the last global batch is part of the checkpoints of one of the runs only."""
    common = f"""
        --num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --mock-data --vocab-size 50 --lr 1e-3
        --tokenizer-type NullTokenizer --micro-batch-size 2 --eval-iters 0 --num-workers 0 --device cpu --bf16
        --disable-bias-linear --num-experts 4 --train-samples 6 --log-interval 1 --save {tmp_path}
    """

    def train(kind: str, last: int, flags: str) -> None:
        words = f"{common} --moe-router-load-balancing-type {kind} {flags} --exit-interval {last}"
        assert run(parse_run_config(words.split(), description="", defaults=DEFAULTS), GPT) == 0

    def weights(iteration: int) -> dict[str, torch.Tensor]:
        return load_file(tmp_path / f"iter_{iteration:07d}/model.safetensors")

    train("aux_loss", 1, "--moe-aux-loss-coeff 0.1")
    train("global_aux_loss", 2, f"--moe-aux-loss-coeff 0.1 --load {tmp_path}")
    train("aux_loss", 3, f"--moe-aux-loss-coeff 0.1 --load {tmp_path}")
    loads = [[v for name, v in weights(i).items() if "router.load" in name] for i in (1, 2, 3)]
    assert [len(tensors) for tensors in loads] == [0, 2, 0]
    assert all(load.sum() == 2 * 8 * 2 for load in loads[1])


def test_counts_are_in_no_norm_and_no_number_of_zeros() -> None:
    """Loads are no weights: 1000 tokens of an expert would hide the norm of a small model."""
    config = config_of(f"{FLAGS} --log-num-zeros-in-grad --log-params-norm")
    engine = engine_of(Mesh(device=CPU), config)
    buffer, squares = engine.buffer, 0.0
    for param in buffer.flat_params:
        if param.name.endswith(("expert_bias", "load")):
            param.view(buffer.params).fill_(1000.0)
        else:
            param.view(buffer.grads).fill_(1.0)
            valid = param.view(buffer.params)[: param.shard_spec.num_valid_rows]
            squares += valid.double().square().sum().item()
    interval = SimpleNamespace(values={})
    ParamsNorm().before_report(cast(Any, SimpleNamespace(config=config, engine=engine)), cast(Any, interval))
    assert interval.values["params norm"] == pytest.approx(squares**0.5, rel=1e-6)
    buffer.flat_params[-1].view(buffer.grads)[:3] = 0.0
    assert engine.optimizer.step(lr=0.0, weight_decay=0.0)["num zeros"].item() == 3
