"""The quickstart at reduced size, interrupted and resumed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SIZES = """
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --train-iters 60
    --eval-interval 20 --eval-iters 2 --save-interval 20 --device cpu
""".split()


def start(folder: Path) -> subprocess.Popen[str]:
    """Start the quickstart with its files in `folder`, in a process group of its own."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.Popen(
        ["bash", ROOT / "scripts" / "pretrain_gpt.sh", *SIZES],
        env=os.environ | {"PATH": path, "QUICKSTART_DIR": str(folder), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], status: int = 0) -> str:
    """Wait until the process exits with `status`, and return its stdout."""
    try:
        stdout, stderr = process.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == status, stdout + stderr
    return stdout


def metrics(folder: Path) -> list[dict]:
    """Logged metrics without timings."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = ("seconds per iteration", "tokens per second", "TFLOP/s per device", "mfu", "hfu")
    return [{k: v for k, v in line.items() if k not in timed} for line in lines]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a quickstart that ran without interruption on a small corpus."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    corpus = ["tools/make_corpus.py", "--output", folder / "corpus.jsonl", "--megabytes", "1"]
    subprocess.run([sys.executable, *corpus], cwd=ROOT, check=True, capture_output=True)
    assert "Done." in finish(start(folder))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("interruption", ["Ctrl-C", "SIGTERM to the script"])
def test_a_resumed_quickstart_matches_an_uninterrupted_one(
    uninterrupted: Path, tmp_path: Path, interruption: str
) -> None:
    folder = tmp_path / "interrupted"
    made = shutil.ignore_patterns("checkpoints", "tensorboard", "metrics.jsonl")
    shutil.copytree(uninterrupted, folder, ignore=made)
    process = start(folder)
    while " 30/60 " not in process.stdout.readline():
        assert process.poll() is None
    if interruption == "Ctrl-C":
        os.killpg(process.pid, signal.SIGINT)
        assert "Run the same command to resume" in finish(process, 130)
    else:
        process.send_signal(signal.SIGTERM)
        assert "Run the same command to resume" in finish(process, 143)
    stopped = int((folder / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    assert 30 <= stopped < 60

    assert f"iterations {stopped + 1} to 60" in finish(start(folder))
    assert metrics(folder) == metrics(uninterrupted)
    logged = [line["iteration"] for line in metrics(folder) if "lm loss" in line]
    assert logged == [10, 20, 30, 40, 50, 60]
