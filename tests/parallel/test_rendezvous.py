"""Rendezvous on a store that holds keys of earlier attempts."""

from __future__ import annotations

import datetime
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from distributed import free_port, rank_environment
from torch.distributed import TCPStore

from megatron.errors import InputError
from megatron.parallel import rendezvous
from megatron.parallel.config import ParallelConfig
from megatron.parallel.mesh import init_mesh
from megatron.parallel.rendezvous import agree, meet

TIMEOUT = datetime.timedelta(seconds=20)


def attempt(port: int, ranks: range, size: int, timeout: datetime.timedelta = TIMEOUT) -> list[str]:
    def one(rank: int) -> str:
        return agree(TCPStore("127.0.0.1", port, is_master=False, timeout=timeout), rank, size, timeout)

    with ThreadPoolExecutor(max_workers=len(ranks)) as threads:
        return list(threads.map(one, ranks))


def test_every_attempt_has_its_own_name() -> None:
    port = free_port()
    server = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    names = [attempt(port, range(5), 5) for _ in range(4)]
    assert [len(set(ranks)) for ranks in names] == [1] * 4
    assert len({ranks[0] for ranks in names}) == 4
    # Attempts with missing ranks, with and without rank 0.
    short = datetime.timedelta(seconds=0.5)
    for ranks in (range(4), range(2, 5)):
        with pytest.raises(RuntimeError):
            attempt(port, ranks, 5, short)
    assert len(set(attempt(port, range(5), 5))) == 1
    del server


def test_absent_ranks_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without torchrun, rank 0 says at intervals whom it waits for, and ends with their list."""
    monkeypatch.setattr(rendezvous, "REPORT_INTERVAL", 0.3)
    address, timeout = ("127.0.0.1", free_port()), datetime.timedelta(seconds=1)
    with ThreadPoolExecutor() as threads:
        here = [threads.submit(meet, rank, 5, address, timeout) for rank in (0, 2)]
        with pytest.raises(RuntimeError, match=r"^waited 1 s for ranks 1, 3-4$"):
            here[0].result()
        with pytest.raises(RuntimeError):
            here[1].result()
    lines = capsys.readouterr().err.splitlines()
    reports = [line for line in lines if line.startswith("rank 0 has waited ")]
    assert 1 <= len(reports) <= 3 and reports[-1].endswith(" s for ranks 1, 3-4")


def test_a_rank_begins_its_next_run_first() -> None:
    address = ("127.0.0.1", free_port())
    with ThreadPoolExecutor() as threads:
        stores = list(threads.map(lambda rank: meet(rank, 2, address, TIMEOUT), range(2)))
        early = threads.submit(meet, 1, 2, address, TIMEOUT)
        time.sleep(0.5)
        stores.clear()  # rank 0 ends its first run
        meet(0, 2, address, TIMEOUT)
        early.result()


def test_absent_rank_0() -> None:
    """torch alone would try for three times as long."""
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=r"127\.0\.0\.1"):
        meet(1, 2, ("127.0.0.1", free_port()), datetime.timedelta(seconds=4))
    assert time.monotonic() - begin < 6


@pytest.mark.parametrize("host", ["", "127.0.0.1"])
def test_wrong_address(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    port = "29500" if not host else "0"
    for name, value in (rank_environment(0, 2, 0) | {"MASTER_ADDR": host, "MASTER_PORT": port}).items():
        monkeypatch.setenv(name, value)
    message = rf"^MASTER_ADDR '{host}', MASTER_PORT {port}: not a host and a port from 1 to 65535$"
    with pytest.raises(InputError, match=message), init_mesh(ParallelConfig(), torch.device("cpu")):
        pass


KILLED = """
import os, runpy, signal, sys
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
sys.argv = ["pretrain_gpt.py", *sys.argv[1:]]
runpy.run_path("pretrain_gpt.py", run_name="__main__")
"""
FLAGS = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 59 --num-layers 1 --hidden-size 16 --num-workers 0
    --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 --train-iters 2 --lr 1e-3 --device cpu
""".split()
ROOT = Path(__file__).resolve().parent.parent.parent


def test_torchrun_ends_ranks_that_wait_for_one_that_was_killed(tmp_path: Path) -> None:
    """Long before --distributed-timeout-minutes, 10."""
    program = tmp_path / "killed.py"
    program.write_text(KILLED)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        f"--master-port={free_port()}",
    ]
    begin = time.monotonic()
    result = subprocess.run(
        [*command, str(program), *FLAGS],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert result.returncode and time.monotonic() - begin < 60
    assert f"exitcode  : -{signal.SIGKILL.value}" in result.stderr and "rank      : 1" in result.stderr
