"""The group of processes of each reduction.

With two replicas of two stages of two tensor-parallel ranks each, rank r contributes 2^r, so that a sum shows which
ranks are in it.
"""

from __future__ import annotations

import ast
import dataclasses
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_distributed
from models import CPU, config_of, engine_of
from training.test_engine import batches

from megatron.checkpoint.load import check_known
from megatron.errors import InputError
from megatron.faults import watchdog
from megatron.faults.diagnosis import corrupt_weights
from megatron.model.flops import flops_per_sample
from megatron.optim.norms import model_sum
from megatron.optim.step_skipper import StepSkipper
from megatron.parallel.mesh import Axis, Mesh, init_mesh
from megatron.recipes import save_best
from megatron.recipes.spikes import SpikeRule
from megatron.reports import devices
from megatron.reports.layout import layout_line
from megatron.reports.throughput import take_work
from megatron.reports.timers import Timers
from megatron.training.build import microbatch_flops
from megatron.training.engine import Engine
from megatron.training.report import History
from megatron.training.stop import StopRequests

ROOT = Path(__file__).resolve().parents[2]
RANKS = range(8)
LAYOUT = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"


def over_all(mesh: Mesh, value: float, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Results of what all processes agree on."""
    stop, timers = StopRequests(mesh), Timers(1, CPU)
    stop.started -= value
    stop.reason()
    timers.spans["optimizer"].append((0.0, value))
    patch.setattr(devices, "PEAK_FLOPS", [lambda name, dtype: value])
    patch.setattr(devices, "memory_use", lambda device: {"allocated": int(value)})
    patch.setattr(save_best, "lowest_before", lambda root, iteration: value)
    config = config_of(f"--save-best --save none --eval-iters 1 --eval-interval 1 {LAYOUT}")
    best = save_best.SaveBest()
    state = types.SimpleNamespace(iteration=0)
    with best.during_run(types.SimpleNamespace(config=config, mesh=mesh, state=state)):
        pass
    patch.setattr(time, "time_ns", lambda: int(value))
    store = watchdog.connect(mesh)
    store.set(f"here {mesh.world.rank}", "")
    return {
        "seconds": stop.elapsed,
        "phases": timers.take(["optimizer"], mesh.world)["optimizer"],
        "peak": devices.find_peak(mesh, torch.matmul, torch.float32).flops,
        "most memory": devices.max_memory(mesh),
        "memory of a replica": devices.memory_by_rank(mesh)["allocated"],
        "lowest loss": best.lowest,
        "ranks in the store": [rank for rank in RANKS if watchdog.wait_for(store, f"here {rank}")],
    }


def over_parts(engine: Engine, value: float) -> dict[str, Any]:
    """Results of what only some processes have in common."""
    mesh, share = engine.mesh, torch.tensor([value], dtype=torch.float64)
    history, rule = History(("loss",), []), SpikeRule(3.0, mesh)
    history.add(1, 1, share.clone(), {"grad norm": torch.tensor(1.0)})
    StepSkipper([rule], CPU, stops=False).decide(torch.tensor(1.0), share.clone())
    engine.samples[16, 16] = int(value)
    work = take_work(engine)
    # The sum of a loss mask is the number of tokens.
    masked = (dataclasses.replace(b, loss_mask=torch.full((2, 16), value / 32)) for b in batches(1))
    batch = engine.next_global_batch(masked, 1, 0)
    engine.buffer.grads.fill_(1.0)
    return {
        "loss of the log": history.collect(mesh)[0]["loss"],
        "loss of the spike rule": rule.window[0, -1].item(),
        "tokens": work[0] / 16,
        "denominator": batch.denominators.item(),
        "sample of the dropout": batch.dropout_keys[0].sample,
        "elements": model_sum(engine.optimizer.grads, engine.buffer.buckets, mesh, torch.sum).item(),
        "parameters": engine.buffer.num_elements,
    }


def results() -> tuple[dict[str, Any], dict[str, Any], list[bool], str]:
    config = config_of(LAYOUT)
    with init_mesh(config.parallel, CPU) as mesh, pytest.MonkeyPatch.context() as patch:
        rank = mesh.world.rank
        reduced = over_all(mesh, 2.0**rank, patch)
        engine = engine_of(mesh, config)
        parts = over_parts(engine, 2.0**rank)
        known = []
        for other in (4, 2, 1):  # a rank of the other stage, replica, tensor-parallel shard
            source = types.SimpleNamespace(folder="x", index={str(r): None for r in (rank, rank ^ other)})
            try:
                check_known(source, {str(rank)}, mesh)
                known.append(True)
            except InputError:
                known.append(False)
        if rank == 5:
            engine.buffer.flat_params[0].view(engine.buffer.params).view(-1)[0] = torch.nan
        return reduced, parts, known, corrupt_weights(engine)


def test_ranks_of_each_reduction() -> None:
    parameters = 4 * (12 * 32**2 + 13 * 32) + (60 + 16) * 32 + 2 * 32
    for rank, (reduced, parts, known, corrupt) in enumerate(run_distributed(results, 8)):
        assert reduced == {
            "seconds": 128,
            "phases": {r: 2.0**r for r in RANKS},
            "peak": 255 / 8,
            "most memory": {"mem-allocated-bytes": 128},
            "memory of a replica": {r: 2**r for r in (0, 1, 4, 5)},
            "lowest loss": 1.0,  # that of rank 0, which reads the folder
            "ranks in the store": list(RANKS),
        }
        replicas = 2**rank + 2 ** (rank ^ 2)
        pipelines = sum(2**r for r in RANKS if r % 2 == rank % 2)
        assert parts == {
            "loss of the log": pipelines,
            "loss of the spike rule": pipelines,
            "tokens": replicas,
            "denominator": replicas,
            "sample of the dropout": 2 * (rank // 2 % 2),
            "elements": parameters,
            "parameters": parameters,
        }
        assert known == [True, False, False]
        assert corrupt.endswith("on rank 5") and corrupt.count("rank") == 1


def test_sizes_of_each_axis() -> None:
    """Quantities that depend on the sizes of axes, with another size for each axis."""
    axes = {"tp": Axis(1, 2), "pp": Axis(1, 3), "dp": Axis(4, 5), "dp_cp": Axis(4, 5)}
    mesh = Mesh(device=CPU, world=Axis(29, 30), **axes)
    config = config_of("--tensor-model-parallel-size 2 --num-layers 6 --pipeline-model-parallel-size 3")
    sample = flops_per_sample(config.model, seq_length=16, padded_vocab_size=64, num_logits=16)
    assert microbatch_flops(config, mesh, 64) == pytest.approx(sample * 2 / (2 * 3))
    line = layout_line(types.SimpleNamespace(mesh=mesh, config=config))
    assert line == "tensor 2 x data 5 x pipeline 3 = 30 processes; 1f1b schedule"
    config = config_of(
        "--num-layers 4 --pipeline-model-parallel-size 3 --pipeline-model-parallel-layout Et|tt|tL"
    )
    line = layout_line(types.SimpleNamespace(mesh=mesh, config=config))
    assert line.endswith("; 1f1b schedule; stages Et|tt|tL")
    config = config_of("--num-layers 4 --pipeline-model-parallel-size 3 --decoder-last-pipeline-num-layers 2")
    line = layout_line(types.SimpleNamespace(mesh=mesh, config=config))
    assert line.endswith("; 1f1b schedule; stages of 1, 1, 2 layers")
    replicas = Mesh(device=CPU, world=Axis(4, 5), dp=Axis(4, 5), dp_cp=Axis(4, 5))
    config = config_of("--use-distributed-optimizer")
    line = layout_line(types.SimpleNamespace(mesh=replicas, config=config))
    assert line == "tensor 1 x data 5 x pipeline 1 = 5 processes; distributed optimizer"
    experts = {"tp": Axis(1, 2), "dp": Axis(1, 2), "dp_cp": Axis(1, 2), "expert": Axis(3, 4)}
    mesh = Mesh(device=CPU, world=Axis(3, 4), **experts)
    flags = (
        "--disable-bias-linear --num-experts 4 --tensor-model-parallel-size 2 --expert-model-parallel-size 2"
    )
    line = layout_line(types.SimpleNamespace(mesh=mesh, config=config_of(flags)))
    assert line.endswith("= 4 processes; experts: expert 2 x tensor 2 x data 1")


def test_all_processes_agree_on_errors() -> None:
    """An error that ends one process ends all, and what they must have in common is compared with all.

    Communication among the processes of the whole run takes `mesh.world`, or an axis that was made of it.
    """
    collectives = {"raise_on_all_ranks", "gather_texts", "all_equal", "host_max"}
    found = []
    definitions = ROOT / "megatron" / "parallel" / "collectives.py"
    for path in {*(ROOT / "megatron").rglob("*.py")} - {definitions}:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in collectives:
                axis = node.args[0 if node.func.id == "raise_on_all_ranks" else 1]
                name = axis.attr if isinstance(axis, ast.Attribute) else axis.id
                found.append(name)
                assert name == "world", f"{path}:{node.lineno}: {name}"
    assert len(found) > 20
