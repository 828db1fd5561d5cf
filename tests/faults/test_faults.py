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

from megatron.errors import LostRank

ROOT = Path(__file__).resolve().parents[2]
FLAGS = """
    pretrain_gpt.py --mock-data --tokenizer-type NullTokenizer --vocab-size 250 --num-layers 2 --hidden-size 32
    --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 --global-batch-size 4 --train-iters 100000 --lr 1e-3
    --log-interval 1 --eval-iters 0 --num-workers 0 --device cpu --distributed-timeout-minutes 1
""".split()


# pretrain_gpt.py, but forward passes are slow on every rank, or have no end on rank 1 once it has trained a little.
PATCHED = """
import dataclasses, itertools, os, time
import pretrain_gpt
from megatron.cli import run_command
from megatron.errors import InputError

plain, count = pretrain_gpt.forward, itertools.count()

def forward(*arguments):
    {}
    return plain(*arguments)

pretrain_gpt.GPT = dataclasses.replace(pretrain_gpt.GPT, forward=forward)
run_command(pretrain_gpt.main)
"""
SLOW = PATCHED.format("time.sleep(0.5)")
FAILING = PATCHED.format(
    "if os.environ['RANK'] == '1' and next(count) > 30: raise InputError('--x: is wrong')"
)
STUCK = PATCHED.format("os.environ['RANK'] == '1' and next(count) > 30 and time.sleep(1000)")


def start(flags: list[list[str]], program: str | None = None) -> list[subprocess.Popen]:
    """One process for each list of flags, as torchrun would start them, but without torchrun to end them.

    `program`: source to run in place of pretrain_gpt.py.
    """
    port = free_port()
    command = [sys.executable, *FLAGS] if program is None else [sys.executable, "-c", program, *FLAGS[1:]]
    return [
        subprocess.Popen(
            [*command, *own],
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
        pytest.param("--hang-timeout 0", 2, "data-parallel", marks=pytest.mark.slow),
        pytest.param(
            "--hang-timeout 0 --tensor-model-parallel-size 2", 2, "tensor-parallel", marks=pytest.mark.slow
        ),
        ("--hang-timeout 0 --pipeline-model-parallel-size 2", 2, "pipeline"),
        pytest.param("--tensor-model-parallel-size 4", 4, "tensor-parallel", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_dies_is_named(layout: str, processes: int, axis: str) -> None:
    """Among two by what failed, among more by the watchdog."""
    ranks = start([layout.split()] * processes)
    try:
        wait_until_it_trains(ranks[0])
        ranks[1].kill()
        began = time.monotonic()
        _, errors = ranks[0].communicate(timeout=60)
        assert time.monotonic() - began < 30
        assert ranks[0].returncode == LostRank.exit_status
        last = errors.strip().splitlines()[-1]
        assert last.startswith("error: rank 0 waited in ")
        if processes == 2:
            assert "for rank 1; rank 1 is lost" in last
        else:
            assert "for ranks 1-3; one of them is lost" in last
            assert last.endswith("; rank 1 gave no answer: it has ended or is stopped, or cannot be reached")
            assert "  rank 1: no answer" in errors
        assert [rank.wait(timeout=20) for rank in ranks[2:]] == [LostRank.exit_status] * (processes - 2)
        assert f"over the {axis} axis" in last or "over the whole run axis" in last
        assert "Traceback" not in errors
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.slow
def test_a_rank_that_hangs_is_waited_for_no_longer_than_the_timeout() -> None:
    ranks = start([["--tensor-model-parallel-size", "2", "--hang-timeout", "0"]] * 2)
    try:
        wait_until_it_trains(ranks[0])
        ranks[1].send_signal(signal.SIGSTOP)
        _, errors = ranks[0].communicate(timeout=120)
        assert ranks[0].returncode == LostRank.exit_status
        assert "--distributed-timeout-minutes" in errors and "Traceback" not in errors
    finally:
        for rank in ranks:
            rank.kill()


def test_a_rank_that_sleeps_for_ever_ends_the_run_and_is_named() -> None:
    ranks = start([["--pipeline-model-parallel-size", "2", "--hang-timeout", "2"]] * 2, STUCK)
    try:
        wait_until_it_trains(ranks[0])
        began = time.monotonic()
        errors = [rank.communicate(timeout=60)[1] for rank in ranks]
        assert time.monotonic() - began < 30
        assert [rank.returncode for rank in ranks] == [LostRank.exit_status] * 2
        told, own = errors
        assert "rank 0: receive over the pipeline axis, waiting for rank 1, for " in told
        assert "(--hang-timeout); rank 1 is in no communication, in forward (<string>:" in told
        assert "\n  rank 0: receive over the pipeline axis, for " in told
        assert "in forward" in told.partition("stack of rank 1:\n")[2], "the stack of the one that sleeps"
        assert "  thread MainThread:" in own and "roll call by" not in own, "one rank tells of all"
        assert "error: rank 1 ends with the run: rank 1 is in no communication" in own
    finally:
        for rank in ranks:
            rank.kill()


def test_ranks_with_different_layouts_are_told_so() -> None:
    """Before they make groups that do not match."""
    ranks = start([[], [], ["--tensor-model-parallel-size", "2"], ["--tensor-model-parallel-size", "2"]])
    for rank in ranks:
        _, errors = rank.communicate(timeout=60)
        assert rank.returncode == 2, errors
        assert "they differ in --tensor-model-parallel-size" in errors


@pytest.mark.slow
def test_the_timeout_holds_in_every_group() -> None:
    """Also in those that are not the whole run."""
    layout = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --hang-timeout 0".split()
    ranks = start([layout] * 4)
    try:
        wait_until_it_trains(ranks[0])
        ranks[2].send_signal(signal.SIGSTOP)
        for rank in (ranks[0], ranks[1], ranks[3]):
            rank.communicate(timeout=150)
            assert rank.returncode == LostRank.exit_status
    finally:
        for rank in ranks:
            rank.kill()


def test_the_fault_of_one_rank_is_the_runs() -> None:
    """Also its status: what starts runs again is not to do so for what is wrong on one machine alone."""
    ranks = start([["--use-distributed-optimizer"]] * 2, FAILING)
    try:
        errors = [rank.communicate(timeout=60)[1] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [2, 2], errors
        assert errors[1].strip() == "error: --x: is wrong"
        assert "rank 1 has ended: --x: is wrong" in errors[0].strip().splitlines()[-1]
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.slow
def test_a_rank_that_is_stopped_ends_the_run_and_is_named() -> None:
    ranks = start([["--tensor-model-parallel-size", "2", "--hang-timeout", "3"]] * 4)
    try:
        wait_until_it_trains(ranks[0])
        ranks[1].send_signal(signal.SIGSTOP)
        began = time.monotonic()
        others = [ranks[0], *ranks[2:]]
        errors = [rank.communicate(timeout=60)[1] for rank in others]
        assert time.monotonic() - began < 30
        assert [rank.returncode for rank in others] == [LostRank.exit_status] * 3
        assert "rank 1 gave no answer: it has ended or is stopped" in errors[0]
        assert all("  thread MainThread:" in text for text in errors), "each shows its own stacks"
        assert sum("roll call by" in text for text in errors) == 1
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.slow
@pytest.mark.parametrize("signal_to", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_the_rank_that_keeps_the_store_is_lost_without_torchrun(signal_to: signal.Signals) -> None:
    """Nobody can call the roll then; the others end all the same."""
    ranks = start([["--hang-timeout", "2"]] * 2)
    try:
        wait_until_it_trains(ranks[0])
        ranks[0].send_signal(signal_to)
        _, errors = ranks[1].communicate(timeout=60)
        if signal_to == signal.SIGKILL:
            assert ranks[1].returncode == LostRank.exit_status
            assert "the store at MASTER_ADDR and MASTER_PORT is gone" in errors.strip().splitlines()[-1]
        else:
            assert ranks[1].returncode == 1
            assert "Timeout (" in errors and "(most recent call first)" in errors, "of faulthandler"
    finally:
        for rank in ranks:
            rank.kill()


def test_a_slow_run_that_moves_is_left_alone() -> None:
    """Four microbatches of half a second make an iteration longer than the timeout."""
    (run,) = start([["--train-iters", "2", "--hang-timeout", "1.5"]], SLOW)
    out, errors = run.communicate(timeout=60)
    assert run.returncode == 0, errors
    assert " iteration        2/" in out


@pytest.mark.slow
def test_torchrun_shows_which_rank_was_killed() -> None:
    """It ends all other processes at once, and they still say what they learn."""
    command = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}", *FLAGS]
    run = subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        wait_until_it_trains(run)
        children = subprocess.run(
            ["pgrep", "-P", str(run.pid)], capture_output=True, text=True
        ).stdout.split()
        os.kill(int(children[-1]), signal.SIGKILL)
        _, errors = run.communicate(timeout=60)
        assert "rank 1 gave no answer: it has ended or is stopped" in errors
    finally:
        run.kill()


def test_ranks_with_different_flags_are_told_so() -> None:
    ranks = start([["--seed", "1"], ["--seed", "2", "--clip-grad", "0.5"]])
    for number, rank in enumerate(ranks):
        _, errors = rank.communicate(timeout=60)
        assert rank.returncode == 2, errors
        assert "the processes were not started alike: they differ in --seed, --clip-grad" in errors
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
