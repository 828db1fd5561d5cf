"""A run killed at random moments ends like an uninterrupted one."""

from __future__ import annotations

import contextlib
import io
import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
from distributed import run_distributed, start_distributed

from megatron.arguments import parse_run_config
from megatron.plugins import run
from megatron.pretrain_gpt import DEFAULTS, GPT

FLAGS = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 250 --num-layers 2 --hidden-size 64
    --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 --global-batch-size 4 --train-iters 120 --lr 2e-3
    --log-interval 1 --eval-interval 50 --eval-iters 1 --num-workers 0 --device cpu --save-interval 5 --keep-last 2
    --distributed-timeout-minutes 1
"""
LAYOUTS = {
    "D2+ZeRO": "--use-distributed-optimizer --async-save",
    "T2 bf16": "--tensor-model-parallel-size 2 --bf16",
    "P2": "--pipeline-model-parallel-size 2",
}
TIMES = ("seconds per iteration", "tokens per second", "TFLOP/s per device", "mfu", "hfu")


def train(flags: str) -> int:
    config = parse_run_config(f"{FLAGS} {flags}".split(), description="", defaults=DEFAULTS)
    with contextlib.redirect_stdout(io.StringIO()):
        return run(config, GPT)


def records(path: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in TIMES} for row in rows]


def path_flags(folder: Path) -> str:
    return f"--save {folder} --load {folder} --metrics-path {folder / 'metrics.jsonl'}"


def start_and_kill(flags: str, folder: Path, rng: random.Random) -> bool:
    """Start a run and kill one rank or both; return True if it had not ended before."""
    ranks = start_distributed(train, 2, flags)
    deadline = time.monotonic() + rng.uniform(0.2, 3)
    if rng.random() < 0.5:  # while it saves
        nth = rng.randrange(1, 12)
        while nth and time.monotonic() < deadline + 5 and ranks[0][0].is_alive():
            nth -= any(folder.glob(".writing-iter*"))
            time.sleep(rng.uniform(0, 0.005))
    else:
        ranks[0][0].join(deadline - time.monotonic())
    killed = all(process.is_alive() for process, _ in ranks)
    first = rng.randrange(2)
    ranks[first][0].kill()
    if rng.random() < 0.3:  # the other rank has time to notice and exit
        ranks[1 - first][0].join(5)
    ranks[1 - first][0].kill()
    for process, _ in ranks:
        process.join()
    return killed


@pytest.mark.slow
@pytest.mark.parametrize("kills", [1, pytest.param(50, marks=pytest.mark.timeout(1800))])
def test_a_run_killed_at_random_moments(kills: int, tmp_path: Path) -> None:
    rng = random.Random(kills)
    done = rounds = 0
    while done < kills:
        name = list(LAYOUTS)[rounds % len(LAYOUTS)]
        uninterrupted, folder = tmp_path / name.split()[0], tmp_path / f"killed-{rounds}"
        if not uninterrupted.exists():
            assert run_distributed(train, 2, f"{LAYOUTS[name]} {path_flags(uninterrupted)}") == [0, 0]
        flags, in_this_round = f"{LAYOUTS[name]} {path_flags(folder)}", 0
        while in_this_round < 8 and done < kills and start_and_kill(flags, folder, rng):
            in_this_round += 1
            done += 1
        assert run_distributed(train, 2, flags) == [0, 0]
        assert records(folder / "metrics.jsonl") == records(uninterrupted / "metrics.jsonl")
        rounds += 1
