"""Time of training steps with --enable-optimizer-post-validation and without, on four processes over gloo.

The engines are real ones of a small model. Each of its passes is followed by a sleep, so that it takes `PASS` seconds,
and four processes do not need four cores.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from parallel_steps import COMMON, NO_DROPOUT
from parallel_workers import Workers

import megatron.plugins  # noqa: F401 (registers schedules and hooks)
from megatron.arguments import parse_run_config
from megatron.parallel.mesh import Mesh, init_mesh
from megatron.parallel.pipeline import WgradQueue
from megatron.planner.dry_run import longest_batch
from megatron.pretrain_gpt import DEFAULTS, GPT
from megatron.training.build import build_engine
from megatron.training.stage import TrainStage

STAGES, MICROBATCHES, STEPS = 4, 8, 6
PASS = 0.06  # seconds of forward, of the gradient of an input, and of weight gradients
FLAGS = f"""
    {COMMON} {NO_DROPOUT} --device cpu --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16
    --vocab-size 60 --micro-batch-size 1 --global-batch-size {MICROBATCHES} --untie-embeddings-and-output-weights
    --pipeline-model-parallel-size {STAGES} --pipeline-schedule zb-h2
"""
VALIDATED = "--enable-optimizer-post-validation"
# A norm that no gradient exceeds, and one that all exceed.
RUNS = {
    "waits": "--clip-grad 1e6",
    "validated": f"--clip-grad 1e6 {VALIDATED}",
    "validated, always clipped": f"--clip-grad 1e-6 {VALIDATED}",
}
# Passes of `STEPS` steps: without waits the last stage ends p - 1 passes after the first, once.
LONGER, SHORTER = 3 * MICROBATCHES + STAGES - 1, 3 * MICROBATCHES
PASSES = {
    "waits": STEPS * LONGER,
    "validated": STEPS * SHORTER + STAGES - 1,
    "validated, always clipped": STEPS * LONGER,
}


def _paced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let calls of a function take `PASS` seconds."""

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        end = time.perf_counter() + PASS
        result = function(*arguments)
        time.sleep(max(0.0, end - time.perf_counter()))
        return result

    return call


def make_run(flags: str, mesh: Mesh) -> Callable[[], None]:
    """Return a function that trains for `STEPS` steps."""
    config = parse_run_config(f"{FLAGS} {flags}".split(), description="", defaults=DEFAULTS)
    engine = build_engine(config, GPT, mesh, vocab_size=60, padded_vocab_size=60)
    engine.buffer.initialize(1)
    batch = longest_batch(config, GPT, 60)

    def run() -> None:
        for _ in range(STEPS):
            engine.train_step(
                iter([batch] * MICROBATCHES),
                num_microbatches=MICROBATCHES,
                consumed_samples=0,
                lr=1e-5,
                weight_decay=0.1,
            )

    return run


def time_runs() -> Iterator[dict[str, float]]:
    """Yield seconds of this rank by the name of a run."""
    TrainStage.forward = _paced(TrainStage.forward)  # type: ignore[method-assign]
    TrainStage.backward = _paced(TrainStage.backward)  # type: ignore[method-assign]
    WgradQueue.run = _paced(WgradQueue.run)  # type: ignore[method-assign]
    config = parse_run_config(FLAGS.split(), description="", defaults=DEFAULTS)
    with init_mesh(config.parallel, torch.device("cpu")) as mesh:
        runs = {name: make_run(flags, mesh) for name, flags in RUNS.items()}
        while True:
            seconds = {}
            for name, run in runs.items():
                dist.barrier()
                begin = time.perf_counter()
                run()
                seconds[name] = time.perf_counter() - begin
            yield seconds


def compare_post_validation(rounds: int) -> dict[str, object]:
    """Compare the times of runs with theory. The first round warms up: its first steps wait for the norm."""
    with Workers(time_runs, STAGES) as workers:
        workers.next()
        measured = [workers.next() for _ in range(rounds)]
    seconds = {
        name: statistics.median(max(rank[name] for rank in ranks) for ranks in measured) for name in RUNS
    }
    rows: dict[str, object] = {
        name: {"seconds": round(s, 4), "time / theory": round(s / (PASS * PASSES[name]), 4)}
        for name, s in seconds.items()
    }
    rows["time validated / waiting"] = round(seconds["validated"] / seconds["waits"], 4)
    rows["by theory"] = round(PASSES["validated"] / PASSES["waits"], 4)
    print(rows, flush=True)
    return {"stages": STAGES, "microbatches": MICROBATCHES, "steps": STEPS, "pass": PASS, **rows}
