"""The SLURM job with stand-ins for srun and scontrol."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from distributed import free_port

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "slurm" / "pretrain.sh"
FLAGS = """
    pretrain_gpt.py --mock-data --tokenizer-type NullTokenizer --vocab-size 250 --num-layers 2 --hidden-size 32
    --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 --global-batch-size 4 --lr 1e-3 --log-interval 1
    --eval-iters 0 --num-workers 0 --device cpu --distributed-timeout-minutes 1
""".split()
# Starts the tasks, writes their process ids to a file, and exits with the highest status.
SRUN = f"""#!{sys.executable}
import os, pathlib, subprocess, sys
arguments = [word for word in sys.argv[1:] if not word.startswith(("--kill-on-bad", "--cpus"))]
tasks = [
    subprocess.Popen(arguments, env=os.environ | {{"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)}}) for i in range(2)
]
pathlib.Path("tasks").write_text(" ".join(str(task.pid) for task in tasks))
sys.exit(max(128 - code if code < 0 else code for code in [task.wait() for task in tasks]))
"""
# Its list of hosts is longer than a pipe holds.
SCONTROL = """#!/bin/sh
case $1 in show) echo 127.0.0.1 && seq 100000 ;; requeue) echo requeued "$2" >> requeued ;; esac
"""


@pytest.fixture
def slurm(tmp_path: Path):
    """Function that starts the job in a folder of its own and returns the process."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    for name in ("pretrain_gpt.py", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)

    job = {"SLURM_JOB_ID": str(free_port()), "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "node[1-2]"}

    def start(*arguments: str | Path, **environment: str) -> subprocess.Popen:
        path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": sys.executable}
        return subprocess.Popen(
            ["bash", SCRIPT, *map(str, arguments)],
            cwd=tmp_path,
            env=os.environ | path | job | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


def wait_for(path: Path, size: int) -> None:
    deadline = time.monotonic() + 60
    while not path.exists() or path.stat().st_size < size:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGUSR1, 138), pytest.param(signal.SIGKILL, 200, marks=pytest.mark.slow)]
)
def test_a_stopped_job_is_requeued_and_resumes(slurm, tmp_path, number, status) -> None:
    paths = ["--save", tmp_path / "run", "--load", tmp_path / "run", "--metrics-path", tmp_path / "m.jsonl"]
    job = slurm(*FLAGS, *paths, "--save-interval", "5", "--train-iters", "100000")
    wait_for(tmp_path / "m.jsonl", 3000)
    tasks = [int(word) for word in (tmp_path / "tasks").read_text().split()]
    for task in tasks if number == signal.SIGUSR1 else tasks[1:]:
        os.kill(task, number)
    output, errors = job.communicate(timeout=60)
    assert job.returncode == status, errors
    assert (tmp_path / "requeued").read_text().startswith("requeued ")
    assert "Traceback" not in errors
    done = int((tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text())
    job = slurm(*FLAGS, *paths, "--train-iters", str(done + 2))
    output, errors = job.communicate(timeout=60)
    assert job.returncode == 0, errors
    assert f"iterations {done + 1} to {done + 2}" in output and "training is done" in output
    assert not list(tmp_path.glob(".*.faults"))


def test_input_errors_are_not_requeued(slurm, tmp_path) -> None:
    job = slurm(*FLAGS, "--train-iters", "5", "--lr", "-1")
    errors = job.communicate(timeout=60)[1]
    assert job.returncode == 2 and "error: --lr: -1.0 is too small" in errors
    assert not (tmp_path / "requeued").exists()


def test_a_size_script_runs_as_tasks_of_the_job(slurm, tmp_path) -> None:
    stand_in = tmp_path / "python"
    stand_in.write_text('#!/bin/sh\necho "task $RANK $LOCAL_RANK $WORLD_SIZE runs $1"; exit "${STATUS:-0}"\n')
    stand_in.chmod(0o755)
    size = ["scripts/pretrain_gpt_1t.sh", "--mock-data"]
    output, errors = slurm(*size, PYTHON=str(stand_in)).communicate(timeout=60)
    assert {f"task {i} {i} 2 runs pretrain_gpt.py" for i in range(2)} <= set(output.splitlines()), errors
    assert "training is done" in output and not (tmp_path / "requeued").exists()
    job = slurm(*size, PYTHON=str(stand_in), STATUS="138")
    assert "saved before the time limit" in job.communicate(timeout=60)[0] and job.returncode == 138
    assert (tmp_path / "requeued").exists()
    job = slurm("scripts/pretrain_gpt_345m.sh")
    assert "error: DATA_PATH is not set" in job.communicate(timeout=60)[1] and job.returncode == 2


def test_restarts_are_bounded(slurm, tmp_path) -> None:
    (tmp_path / "srun").write_text("#!/bin/sh\nexit 200\n")
    for number in (1, 2):
        job = slurm(*FLAGS, MAX_RESTARTS="2")
        assert f"restart {number} of at most 2" in job.communicate(timeout=60)[0]
        assert (tmp_path / "requeued").read_text().count("requeued") == number
    job = slurm(*FLAGS, MAX_RESTARTS="2")
    assert "after 2 restarts; giving up" in job.communicate(timeout=60)[1] and job.returncode == 200
    assert (tmp_path / "requeued").read_text().count("requeued") == 2


def test_help_and_no_job() -> None:
    done = subprocess.run(["bash", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0 and "sbatch [--nodes 4 ...]" in done.stdout and "disable" not in done.stdout
    environment = {k: v for k, v in os.environ.items() if k != "SLURM_JOB_ID"}
    done = subprocess.run(["bash", SCRIPT, "x.py"], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (2, "error: not a SLURM job; start it with sbatch\n")
