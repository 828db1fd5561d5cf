"""Phase timers: levels, log output, and no synchronization with the GPU."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from distributed import run_distributed
from models import CPU, config_of, engine_of

from megatron.data.gpt_dataset import GPTBatch
from megatron.parallel.mesh import ALONE, init_mesh
from megatron.parallel.phases import NOTHING
from megatron.reports.timers import ITERATION, Timers, times_text
from megatron.training.engine import Engine

FLAGS = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 99 --num-layers 2 --hidden-size 16 --eval-iters 1
    --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 --global-batch-size 4 --train-iters 4 --lr 1e-3
    --log-interval 2 --eval-interval 2 --num-workers 0 --device cpu
""".split()
BLOCK = re.compile(r"\(min, max\) time across ranks \(ms\):((?:\n    [\w-]+ \.+: \([\d.]+, [\d.]+\))+)")


def test_each_level_times_only_its_phases() -> None:
    off, coarse, fine = (Timers(level, CPU) for level in (0, 1, 2))
    assert off("optimizer") is off("forward-compute") is coarse("forward-compute") is NOTHING
    for timers in (off, coarse, fine):
        for _ in range(2):
            with timers("optimizer"), timers("forward-compute"):
                time.sleep(0.01)
    assert off.take(ITERATION, ALONE) == {} and not off.spans
    assert coarse.take(ITERATION, ALONE).keys() == {"optimizer"}
    times = fine.take(["optimizer"], ALONE)
    assert times.keys() == {"optimizer"} and times["optimizer"][0] >= 0.02
    assert fine.take(ITERATION, ALONE)["forward-compute"][0] == pytest.approx(times["optimizer"][0], rel=0.1)
    assert fine.take(ITERATION, ALONE) == {}


def test_a_failed_phase_is_not_timed() -> None:
    timers = Timers(1, CPU)
    with pytest.raises(ZeroDivisionError), timers("optimizer"):
        _ = 1 / 0
    assert timers.take(ITERATION, ALONE) == {}


def test_text_has_nvidias_format() -> None:
    times = {"forward-compute": {0: 0.012345, 1: 0.5}, "optimizer": {1: 0.001}}
    assert times_text(times, "minmax") == (
        "(min, max) time across ranks (ms):\n"
        "    forward-compute ................................: (12.35, 500.00)\n"
        "    optimizer ......................................: (1.00, 1.00)"
    )
    assert times_text(times, "max").splitlines()[:2] == [
        "max time across ranks (ms):",
        "    forward-compute ................................: 500.00",
    ]
    assert times_text(times, "all") == (
        "times across ranks (ms):\n  forward-compute:\n     rank  0: 12.35\n     rank  1: 500.00\n"
        "  optimizer:\n     rank  1: 1.00"
    )


def test_a_run_logs_its_phases(pretrain: Callable[..., str], tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    flags = ["--timing-log-level", 2, "--log-timers-to-tensorboard", "--metrics-path", metrics]
    out = pretrain(*FLAGS, *flags, "--save", tmp_path / "save")
    blocks = [[line.split()[0] for line in block.splitlines() if line] for block in BLOCK.findall(out)]
    phases = [
        "batch-generator",
        "forward-backward",
        "forward-compute",
        "backward-compute",
        "grads-reduce",
        "optimizer",
    ]
    assert blocks == [phases, ["evaluate"], phases, ["save-checkpoint"], ["evaluate"], ["evaluate"]]
    record = json.loads(metrics.read_text().splitlines()[0])
    inside = record["forward-compute-time"] + record["backward-compute-time"]
    assert 0 < inside < record["forward-backward-time"]
    outside = ("batch-generator", "forward-backward", "grads-reduce", "optimizer")
    whole = sum(record[f"{phase}-time"] for phase in outside)
    assert 0.5 * record["seconds per iteration"] < whole < record["seconds per iteration"]


def test_level_0_logs_nothing(pretrain: Callable[..., str]) -> None:
    assert "time across ranks" not in pretrain(*FLAGS)


def phases_of(flags: str) -> dict[str, dict[int, float]]:
    """Phase times of two steps with two microbatches each."""
    config = config_of(flags)
    with init_mesh(config.parallel, CPU) as mesh:
        engine, timers = engine_of(mesh, config), Timers(2, CPU)
        engine.phases.observers.append(timers)
        for _ in range(2):
            step(engine)
        return timers.take(ITERATION, mesh.world)


def step(engine: Engine) -> None:
    tokens = torch.zeros(2, 17, dtype=torch.long)
    batch = GPTBatch(
        tokens=tokens[:, :-1],
        labels=tokens[:, 1:],
        loss_mask=torch.ones(2, 16),
        position_ids=torch.arange(16).expand(2, 16),
    )
    engine.train_step(iter([batch] * 2), num_microbatches=2, consumed_samples=0, lr=1e-3, weight_decay=0.0)


def test_stages_time_their_transfers() -> None:
    times, same = run_distributed(phases_of, 2, "--pipeline-model-parallel-size 2")
    assert same == times
    assert times.keys() == set(ITERATION) - {"params-gather"}
    assert set(times["forward-recv"]) == set(times["backward-send"]) == {1}
    assert set(times["forward-send"]) == set(times["backward-recv"]) == {0}
    assert set(times["forward-compute"]) == set(times["optimizer"]) == {0, 1}


@pytest.mark.slow
@pytest.mark.parametrize("overlap", ["", "--overlap-param-gather"])
def test_replicas_time_the_parameter_gather(overlap: str) -> None:
    times, _ = run_distributed(phases_of, 2, f"--use-distributed-optimizer {overlap}")
    assert set(times["params-gather"]) == {0, 1}


@pytest.mark.gpu
def test_timers_do_not_synchronize_with_the_gpu() -> None:
    """Times a phase that only launches GPU work, and an empty phase while the GPU is busy."""
    device = torch.device("cuda", 0)
    x = torch.randn(4096, 4096, device=device)
    timers = Timers(2, device)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        begin = time.perf_counter()
        with timers("forward-compute"):
            for _ in range(100):
                x = x @ x / 4096
        launched = time.perf_counter() - begin
        with timers("batch-generator"):
            pass
    finally:
        torch.cuda.set_sync_debug_mode("default")
    times = timers.take(ITERATION, ALONE)
    # 100 matmuls of 137 GFLOP at less than 200 TFLOP/s in fp32.
    assert times["forward-compute"][0] > 0.05 > launched
    assert times["batch-generator"][0] < 1e-3
