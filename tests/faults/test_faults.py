"""Ranks that die, hang or start with other flags: the other ranks report it and exit."""

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


# pretrain_gpt.py with a patched forward pass: slow on every rank, or failing or hanging on rank 1 after some steps.
PATCHED = """
import dataclasses, itertools, os, time
from megatron import pretrain_gpt
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
    """Start one process for each list of flags as torchrun would, but without torchrun to end the others.

    Args:
        program: source to run in place of pretrain_gpt.py.
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


def wait_for_training(process: subprocess.Popen) -> None:
    for line in process.stdout:
        if " 3/" in line:
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
def test_dead_rank_is_named(layout: str, processes: int, axis: str) -> None:
    """With two ranks the failed communication names it, with more ranks the watchdog."""
    ranks = start([layout.split()] * processes)
    try:
        wait_for_training(ranks[0])
        ranks[1].kill()
        begin = time.monotonic()
        _, errors = ranks[0].communicate(timeout=60)
        assert time.monotonic() - begin < 30
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
def test_hung_rank_ends_the_run_after_the_timeout() -> None:
    ranks = start([["--tensor-model-parallel-size", "2", "--hang-timeout", "0"]] * 2)
    try:
        wait_for_training(ranks[0])
        ranks[1].send_signal(signal.SIGSTOP)
        _, errors = ranks[0].communicate(timeout=120)
        assert ranks[0].returncode == LostRank.exit_status
        assert "--distributed-timeout-minutes" in errors and "Traceback" not in errors
    finally:
        for rank in ranks:
            rank.kill()


def test_sleeping_rank_ends_the_run_and_is_named() -> None:
    ranks = start([["--pipeline-model-parallel-size", "2", "--hang-timeout", "2"]] * 2, STUCK)
    try:
        wait_for_training(ranks[0])
        begin = time.monotonic()
        errors = [rank.communicate(timeout=60)[1] for rank in ranks]
        assert time.monotonic() - begin < 30
        assert [rank.returncode for rank in ranks] == [LostRank.exit_status] * 2
        report, own = errors
        assert "rank 0: receive over the pipeline axis, waiting for rank 1, for " in report
        assert "(--hang-timeout); rank 1 is in no communication, in forward (<string>:" in report
        assert "\n  rank 0: receive over the pipeline axis, for " in report
        assert "in forward" in report.partition("stack of rank 1:\n")[2], "the stack of the sleeping rank"
        assert "  thread MainThread:" in own and "roll call by" not in own, "one rank reports on all"
        assert "error: rank 1 ends with the run: rank 1 is in no communication" in own
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.slow
def test_different_layouts_are_reported() -> None:
    """The layouts are compared before process groups are created, which would not match."""
    ranks = start([[], ["--tensor-model-parallel-size", "2"]])
    for rank in ranks:
        _, errors = rank.communicate(timeout=60)
        assert rank.returncode == 2, errors
        assert "they differ in --tensor-model-parallel-size" in errors


@pytest.mark.slow
def test_timeout_applies_to_every_group() -> None:
    """The timeout applies to the groups of single axes too."""
    layout = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --hang-timeout 0".split()
    ranks = start([layout] * 4)
    try:
        wait_for_training(ranks[0])
        ranks[2].send_signal(signal.SIGSTOP)
        for rank in (ranks[0], ranks[1], ranks[3]):
            rank.communicate(timeout=150)
            assert rank.returncode == LostRank.exit_status
    finally:
        for rank in ranks:
            rank.kill()


def test_error_of_one_rank_ends_the_run() -> None:
    """All ranks exit with its status, so that an error on one machine does not restart the run."""
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
def test_stopped_rank_ends_the_run_and_is_named() -> None:
    ranks = start([["--tensor-model-parallel-size", "2", "--hang-timeout", "3"]] * 4)
    try:
        wait_for_training(ranks[0])
        ranks[1].send_signal(signal.SIGSTOP)
        begin = time.monotonic()
        others = [ranks[0], *ranks[2:]]
        errors = [rank.communicate(timeout=60)[1] for rank in others]
        assert time.monotonic() - begin < 30
        assert [rank.returncode for rank in others] == [LostRank.exit_status] * 3
        assert "rank 1 gave no answer: it has ended or is stopped" in errors[0]
        assert all("  thread MainThread:" in text for text in errors), "each shows its own stacks"
        assert sum("roll call by" in text for text in errors) == 1
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.slow
@pytest.mark.parametrize("signal_to", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_losing_the_store_without_torchrun(signal_to: signal.Signals) -> None:
    """The roll call needs the store, but the other ranks exit without it."""
    ranks = start([["--hang-timeout", "2"]] * 2)
    try:
        wait_for_training(ranks[0])
        ranks[0].send_signal(signal_to)
        _, errors = ranks[1].communicate(timeout=60)
        if signal_to == signal.SIGKILL:
            assert ranks[1].returncode == LostRank.exit_status
            assert (
                "the rendezvous store at MASTER_ADDR:MASTER_PORT (held by rank 0 or its torchrun) is unreachable"
                in errors.strip().splitlines()[-1]
            )
        else:
            assert ranks[1].returncode == 1
            assert "Timeout (" in errors and "(most recent call first)" in errors, "of faulthandler"
    finally:
        for rank in ranks:
            rank.kill()


def test_slow_run_is_not_aborted() -> None:
    """Four microbatches of half a second make an iteration longer than the timeout."""
    (run,) = start([["--train-iters", "2", "--hang-timeout", "1.5"]], SLOW)
    out, errors = run.communicate(timeout=60)
    assert run.returncode == 0, errors
    assert " 2/2 " in out


@pytest.mark.slow
def test_killed_rank_is_reported_under_torchrun() -> None:
    """torchrun ends all other processes at once, and they still report the lost rank."""
    command = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}", *FLAGS]
    run = subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        wait_for_training(run)
        children = subprocess.run(
            ["pgrep", "-P", str(run.pid)], capture_output=True, text=True
        ).stdout.split()
        os.kill(int(children[-1]), signal.SIGKILL)
        _, errors = run.communicate(timeout=60)
        assert "rank 1 gave no answer: it has ended or is stopped" in errors
    finally:
        run.kill()


def test_different_flags_are_reported() -> None:
    ranks = start([["--seed", "1"], ["--seed", "2", "--clip-grad", "0.5"]])
    for number, rank in enumerate(ranks):
        _, errors = rank.communicate(timeout=60)
        assert rank.returncode == 2, errors
        assert "the processes were not started alike: they differ in --seed, --clip-grad" in errors
        assert f"rank {number} has " in errors and f"--seed {number + 1}" in errors


@pytest.mark.slow
def test_torchrun_restarts_a_run_that_lost_a_process(tmp_path: Path) -> None:
    """With --max-restarts the run resumes from its last checkpoint, and its metrics have no gaps or duplicates."""
    checkpoint = ["--save", tmp_path / "run", "--load", tmp_path / "run", "--save-interval", "10"]
    flags = [*FLAGS[1:], *checkpoint, "--metrics-path", tmp_path / "metrics.jsonl", "--train-iters", "120"]
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
            if " 15/120 " in line:
                break
        ranks = subprocess.run(
            ["pgrep", "-P", str(process.pid)], capture_output=True, text=True
        ).stdout.split()
        os.kill(int(ranks[1]), signal.SIGKILL)
        output, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    resumed = re.search(r"iterations (\d+) to 120", output)
    assert resumed and int(resumed[1]) % 10 == 1 and int(resumed[1]) > 10, output
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == list(range(1, 121))
