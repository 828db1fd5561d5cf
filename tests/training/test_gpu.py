"""Training on a GPU matches training on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

FLAGS = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 250 --num-layers 4 --hidden-size 64
    --num-attention-heads 4 --seq-length 64 --micro-batch-size 2 --global-batch-size 8 --train-iters 20 --lr 2e-3
    --attention-dropout 0 --hidden-dropout 0 --log-interval 1 --eval-interval 10 --eval-iters 1
""".split()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("precision", "tolerance"),
    [([], 1e-3), (["--bf16"], 2e-2), (["--fp16", "--initial-loss-scale", 65536], 2e-2)],
    ids=["fp32", "bf16", "fp16"],
)
def test_same_as_on_a_cpu(pretrain, tmp_path: Path, precision: list, tolerance: float) -> None:
    losses = []
    for device in ("cpu", "cuda"):
        path = tmp_path / f"{device}.jsonl"
        pretrain(*FLAGS, *precision, "--device", device, "--metrics-path", path)
        records = [json.loads(line) for line in path.read_text().splitlines()]
        losses.append([r[k] for r in records for k in r if k.startswith("lm loss")])
    assert losses[1] == pytest.approx(losses[0], rel=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "precision", ["", "--bf16", "--fp16 --initial-loss-scale 65536 --loss-scale-window 3"]
)
def test_a_cuda_graph_changes_no_bit(pretrain, tmp_path: Path, precision: str) -> None:
    runs = []
    for name, more in (("plain", []), ("graph", ["--cuda-graph"])):
        path = tmp_path / name
        pretrain(*FLAGS, *precision.split(), "--device", "cuda", "--metrics-path", path, *more)
        records = [json.loads(line) for line in path.read_text().splitlines()]
        runs.append([(r.get("lm loss"), r.get("lm loss validation"), r.get("grad norm")) for r in records])
    assert runs[1] == runs[0]


@pytest.mark.gpu
def test_a_resumed_run_continues(pretrain, tmp_path: Path) -> None:
    for folder, runs in (("whole", [[]]), ("parts", [["--exit-interval", 7], []])):
        for extra in runs:
            paths = ["--save", tmp_path / folder, "--load", tmp_path / folder]
            paths += ["--metrics-path", tmp_path / f"{folder}.jsonl"]
            pretrain(*FLAGS, "--bf16", "--device", "cuda", *paths, *extra)
    whole, parts = (
        [json.loads(line).get("lm loss") for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("whole", "parts")
    )
    assert parts == pytest.approx(whole, rel=1e-2)
