"""Processes that die, hang or were started otherwise: the others say so and end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from distributed import free_port, rank_environment

ROOT = Path(__file__).resolve().parents[2]
FLAGS = """
    pretrain_gpt.py --mock-data --tokenizer-type NullTokenizer --vocab-size 250 --num-layers 2 --hidden-size 32
    --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 --global-batch-size 4 --train-iters 100000 --lr 1e-3
    --log-interval 1 --eval-iters 0 --num-workers 0 --device cpu --distributed-timeout-minutes 1
""".split()


def start(flags: list[list[str]]) -> list[subprocess.Popen]:
    """One process for each list of flags, as torchrun would start them, but without torchrun to end them."""
    port = free_port()
    return [
        subprocess.Popen(
            [sys.executable, *FLAGS, *own],
            cwd=ROOT,
            env=os.environ | rank_environment(rank, len(flags), port),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, own in enumerate(flags)
    ]


def wait_until_it_trains(process: subprocess.Popen) -> None:
    for line in process.stdout:
        if " iteration        3/" in line:
            return
    pytest.fail(process.stderr.read())


@pytest.mark.parametrize(
    ("layout", "processes", "axis"),
    [
        ("", 2, "data-parallel"),
        ("--tensor-model-parallel-size 2", 2, "tensor-parallel"),
        ("--pipeline-model-parallel-size 2", 2, "pipeline"),
        ("--tensor-model-parallel-size 4", 4, "tensor-parallel"),
    ],
)
def test_a_rank_that_dies_is_named(layout: str, processes: int, axis: str) -> None:
    ranks = start([layout.split()] * processes)
    try:
        wait_until_it_trains(ranks[0])
        ranks[1].kill()
        began = time.monotonic()
        _, errors = ranks[0].communicate(timeout=60)
        assert time.monotonic() - began < 30
        assert ranks[0].returncode == 200
        last = errors.strip().splitlines()[-1]
        assert last.startswith("error: rank 0 waited in ")
        said = "for rank 1; rank 1 is gone" if processes == 2 else "for ranks 1, 2, 3; one of them is gone"
        assert said in last
        assert f"over the {axis} axis" in last or "over the whole run axis" in last
        assert "Traceback" not in errors
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.slow
def test_a_rank_that_hangs_is_waited_for_no_longer_than_the_timeout() -> None:
    ranks = start([["--tensor-model-parallel-size", "2"]] * 2)
    try:
        wait_until_it_trains(ranks[0])
        ranks[1].send_signal(signal.SIGSTOP)
        _, errors = ranks[0].communicate(timeout=120)
        assert ranks[0].returncode == 200
        assert "--distributed-timeout-minutes" in errors and "Traceback" not in errors
    finally:
        for rank in ranks:
            rank.kill()


def test_ranks_with_different_flags_are_told_so() -> None:
    ranks = start([["--seed", "1"], ["--seed", "2", "--clip-grad", "0.5"]])
    for number, rank in enumerate(ranks):
        _, errors = rank.communicate(timeout=60)
        assert rank.returncode == 2, errors
        assert "the processes were not started alike: --seed, --clip-grad differ between them" in errors
        assert f"rank {number} has " in errors and f"--seed {number + 1}" in errors


def test_torchrun_starts_a_run_again_that_lost_a_process(tmp_path: Path) -> None:
    """`--max-restarts`: it goes on from its last checkpoint, and its metrics have no gap and nothing twice."""
    place = ["--save", tmp_path / "run", "--load", tmp_path / "run", "--save-interval", "10"]
    flags = [*FLAGS[1:], *place, "--metrics-path", tmp_path / "metrics.jsonl", "--train-iters", "120"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=2"]
    process = subprocess.Popen(
        [*command, f"--master-port={free_port()}", FLAGS[0], *map(str, flags)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        for line in process.stdout:
            if " iteration       15/" in line:
                break
        ranks = subprocess.run(
            ["pgrep", "-P", str(process.pid)], capture_output=True, text=True
        ).stdout.split()
        os.kill(int(ranks[1]), signal.SIGKILL)
        output, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    begun = re.search(r"iterations (\d+) to 120", output)
    assert begun and int(begun[1]) % 10 == 1 and int(begun[1]) > 10, output
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == list(range(1, 121))
