"""benchmarks/gpu.sh with a stub for Python that reports a GPU and returns results at once."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HAS_FP8 = importlib.util.find_spec("torchao") is not None

PYTHON = f"""#!/usr/bin/env bash
case "$*" in
  *get_device_name*)
    [[ -z ${{NO_GPU:-}} ]] || {{ printf 'Traceback:\nAssertionError: no CUDA\n' >&2; exit 1; }}
    echo "UserWarning: an old driver" >&2
    echo "NVIDIA H100 80GB HBM3" ;;
  "-m pytest "*)
    echo '<testsuites><testsuite tests="7" failures="1" errors="0" skipped="2" time="3.5"/></testsuites>' >"${{@: -1}}"
    exit 1 ;;
  benchmarks/train.py*)
    echo '{{"command": "train", "commit": "abc", "machine": {{"cores": 8}}, "355m, bf16, cuda":
      {{"ours": {{"MFU": 0.44}}, "nanoGPT, compiled": {{"ours over it": 1.1}},
      "transformers": {{"tokens/s": 20000}}}}}}' >"${{@: -1}}" ;;
  benchmarks/planner_gpu.py*)
    echo '{{"command": "planner", "commit": "abc",
      "runs": {{"llama-1b": {{"seconds": 0.28, "error": -0.05}}}}}}' >"${{@: -1}}" ;;
  benchmarks/gpu_table.py*) exec {shlex.quote(sys.executable)} "$@" ;;
esac
"""

# Runs the script's commands on a CPU.
STAND_IN = f"""#!/usr/bin/env bash
python={shlex.quote(sys.executable)} root={shlex.quote(str(ROOT))}
case "$*" in
  *get_device_name*) echo "NVIDIA H100 80GB HBM3" ;;
  "-m pytest "*) cd "$root" && exec "$python" "$@" ;;
  benchmarks/train.py*)
    export PYTHONPATH=$root/benchmarks:$root/tests:$root  # not for pytest: benchmarks/planner.py hides tests/planner
    exec "$python" "$root/tests/scripts/train_stand_in.py" "${{@:2}}" ;;
  *) exec "$python" "$@" ;;
esac
"""
# With nanoGPT's interface.
NANOGPT = """
import types
import torch.nn.functional as F
from plain_gpt import PlainGPT

GPTConfig = types.SimpleNamespace

class GPT(PlainGPT):
    def __init__(self, c):
        super().__init__(
            vocab_size=c.vocab_size, width=c.n_embd, heads=c.n_head, layers=c.n_layer, length=c.block_size
        )

    def forward(self, x, y):
        logits = super().forward(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), y.flatten())
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("scripts/common.sh", "benchmarks/gpu.sh", "benchmarks/gpu_table.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "benchmarks" / "results").mkdir()
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    return tmp_path


def run(checkout: Path, *parts: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "PYTHON": str(checkout / "python")} | environment
    script = ["bash", str(checkout / "benchmarks" / "gpu.sh"), *parts]
    return subprocess.run(script, env=environment, capture_output=True, text=True)


def results(checkout: Path) -> dict:
    path = checkout / "benchmarks" / "results" / "nvidia-h100-80gb-hbm3.json"
    return json.loads(path.read_text(encoding="utf-8"))


def test_parts_are_added_to_the_results_of_the_device(checkout: Path) -> None:
    done = run(checkout, "tests")
    assert done.returncode == 1  # the exit status of the tests
    counts = {"tests": 7, "failures": 1, "errors": 0, "skipped": 2, "seconds": 3.5}
    assert results(checkout) == {"tests": counts}

    done = run(checkout, "355m", NANOGPT="/peers/nano GPT", LIMIT="100")
    assert (done.returncode, done.stderr) == (0, "")
    first, *table = done.stdout.splitlines()
    command = shlex.split(first[2:])
    assert command[0] == "timeout" and 90 < int(command[3]) <= 100
    assert command[5:-1] == shlex.split(
        "benchmarks/train.py --device cuda --precisions bf16 --nanogpt '/peers/nano GPT' --sizes 355m --output"
    )
    assert results(checkout).keys() == {"tests", "355m"}
    assert table == [
        "tests: tests 7, failures 1, errors 0, skipped 2, seconds 3.5",
        "train (commit abc)",
        "355m, bf16, cuda",
        "  ours                     MFU 0.44",
        "  nanoGPT, compiled        ours over it 1.1",
        "  transformers             tokens/s 20,000",
        "  goal 0.45 for MFU: 0.44, missed",
        "  goal 1.1 for speed over nanoGPT, compiled: 1.1, met",
    ]


def test_verdict_on_fp8(checkout: Path) -> None:
    sides: dict = {"ours": {"MFU": 0.6, "tokens/s": 1000}, "ours, FP8": {"tokens/s": 1240}}
    lines = []
    for measured in (sides, {"ours": sides["ours"]}):
        found = {"7b": {"command": "train", "commit": "abc", "7b, bf16, cuda": measured}}
        (checkout / "found.json").write_text(json.dumps(found))
        command = [sys.executable, checkout / "benchmarks" / "gpu_table.py", checkout / "found.json"]
        lines.append(
            subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
        )
    assert lines == [
        "  goal 1.25 for speed of FP8 over bf16: 1.24, missed",
        "  goal 1.25 for speed of FP8 over bf16: not measured",
    ]


def test_without_parts_all_run_until_the_time_limit(checkout: Path) -> None:
    done = run(checkout)
    sizes = [line.split("--sizes ")[1].split()[0] for line in done.stdout.splitlines() if "--sizes" in line]
    assert sizes == ["small", "355m", "1.3b", "7b"]
    assert done.stdout.endswith("runs\n  llama-1b                 seconds 0.28  error -0.05\n")
    done = run(checkout, LIMIT="0")
    assert done.returncode == 2
    assert done.stderr.splitlines() == ["error: LIMIT=0 seconds are over; call again with this part"] * 6


def test_without_a_gpu_is_a_one_line_error(checkout: Path) -> None:
    done = run(checkout, NO_GPU="1")
    python = checkout / "python"
    assert done.returncode == 2
    assert done.stderr == f"error: torch finds no GPU (PYTHON={python}): AssertionError: no CUDA\n"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_command_on_a_stand_in(checkout: Path) -> None:
    """The tests, which fail without a GPU, then every size; of the last two a compared program fails."""
    (checkout / "python").write_text(STAND_IN)
    bad = NANOGPT.replace("logits = super().forward(x)", "raise RuntimeError('out of memory')")
    for name, code in (("good", NANOGPT), ("bad", bad)):
        (checkout / name).mkdir()
        (checkout / name / "model.py").write_text(code)
    settings = {"LIMIT": "1700", "HOME": str(checkout), "OMP_NUM_THREADS": "1"}
    first = run(checkout, "tests", "small", "355m", NANOGPT=str(checkout / "good"), **settings)
    assert first.returncode == 1, first.stdout + first.stderr
    second = run(checkout, "1.3b", "7b", NANOGPT=str(checkout / "bad"), **settings)
    assert second.returncode == 1, second.stdout + second.stderr
    assert (
        second.stderr.count("error: nanoGPT, compiled: ")
        == second.stderr.count("RuntimeError: out of memory")
        == 2
    )

    found = results(checkout)
    assert found["tests"]["tests"] > 10 and found["tests"]["failures"] > 0
    sides = ["ours", "ours, plain", "nanoGPT, compiled", "transformers, compiled", "largest products"]
    for size in ("small", "355m", "1.3b", "7b"):
        here = found[size][f"{size}, bf16, cuda"]
        expected = sides[:2] + ["ours, CUDA graph"] * (size == "small") + ["ours, FP8"] * HAS_FP8 + sides[2:]
        if size in ("1.3b", "7b"):
            expected.remove("nanoGPT, compiled")
        assert list(here) == expected
        assert all("MFU" in values for side, values in here.items() if side != "largest products")
        losses = {side: values["loss"] for side, values in here.items() if side.startswith("ours")}
        assert max(losses.values()) - min(losses.values()) < 0.02
    verdicts = [line.rpartition(": ") for line in second.stdout.splitlines() if line.startswith("  goal ")]
    goals = [
        goal
        for mfu in (0.45, 0.52, 0.57)
        for goal in (f"{mfu} for MFU", "1.1 for speed over nanoGPT, compiled")
    ]
    goals.append("1.25 for speed of FP8 over bf16")
    assert [goal for goal, _, _ in verdicts] == [f"  goal {goal}" for goal in goals]
    measured = [verdict != "not measured" for _, _, verdict in verdicts]
    assert measured == [True, True, True, False, True, False, HAS_FP8]
