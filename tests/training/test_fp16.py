"""fp16 training: the losses of fp32 and Megatron-LM's loss scale, in every layout and after every resume."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
import os
from pathlib import Path

import pytest
import torch
from distributed import run_distributed
from loss_scale import PlainScale

from megatron import plugins
from megatron.arguments import parse_run_config
from megatron.errors import TrainingFault
from megatron.pretrain_bert import bert
from megatron.pretrain_gpt import DEFAULTS, GPT

FLAGS = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 250 --num-layers 4 --hidden-size 32
    --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 --global-batch-size 4 --train-iters 24 --lr 2e-3
    --attention-dropout 0 --hidden-dropout 0 --log-interval 1 --eval-iters 0 --num-workers 0 --device cpu
    --distributed-timeout-minutes 1
"""
# Overflows until about 2^20, and again whenever the scale grows.
DYNAMIC = "--fp16 --loss-scale-window 2 --hysteresis 3"
TP, PP, SP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--sequence-parallel"
CHUNKS = "--num-layers-per-virtual-pipeline-stage"
ZERO = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 5000"
ZERO2, ZERO3 = (
    f"--data-parallel-sharding-strategy {name} --overlap-grad-reduce --overlap-param-gather"
    for name in ("optim_grads", "optim_grads_params")
)
# Far below the scale at which gradients overflow by themselves.
SMALL = "--fp16 --initial-loss-scale 1024 --loss-scale-window 2 --hysteresis 2"
# Iterations with an injected overflow, covering all cases that hysteresis distinguishes.
OVERFLOWS = (2, 3, 4, 7, 9, 11, 12, 13, 19)


def train(flags: str, task: str = "GPT", overflows: tuple[int, ...] = ()) -> str:
    """Train on this rank; return the fault that ended the run, or its stdout.

    In iterations `overflows` a gradient of the first microbatch on the last rank is made infinite.
    """
    config = parse_run_config(f"{FLAGS} {flags}".split(), description="", defaults=DEFAULTS)
    chosen = GPT if task == "GPT" else bert(binary_head=True)
    last = int(os.environ.get("RANK", 0)) == int(os.environ.get("WORLD_SIZE", 1)) - 1
    replicas = int(os.environ.get("WORLD_SIZE", 1)) // (
        config.parallel.tensor_model_parallel_size * config.parallel.pipeline_model_parallel_size
    )
    calls = itertools.count()

    def inject_overflow(_: object, __: object, out: torch.Tensor) -> None:
        iteration, microbatch = divmod(next(calls), 4 // replicas)
        if iteration + 1 in overflows and microbatch == 0:
            out.register_hook(lambda grad: grad * torch.inf)

    def build_model(*arguments: object) -> torch.nn.Module:
        model = chosen.build_model(*arguments)
        for path, module in model.named_modules():
            if last and path == "decoder.layers.3.mlp.linear_fc1":
                module.register_forward_hook(inject_overflow)
        return model

    with contextlib.redirect_stdout(io.StringIO()) as output:
        try:
            plugins.run(config, dataclasses.replace(chosen, build_model=build_model))
        except TrainingFault as fault:
            return str(fault)
    return output.getvalue()


def metrics(path: Path) -> list[dict]:
    """Metrics of each iteration of a run, without timings."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    timed = ("seconds per iteration", "tokens per second", "TFLOP/s per device", "mfu", "hfu")
    return [{k: v for k, v in row.items() if k not in timed} for row in records]


def run(path: Path, flags: str, **arguments: object) -> list[dict]:
    """Train in this process and return the metrics."""
    train(f"{flags} --metrics-path {path}", **arguments)
    return metrics(path)


@pytest.mark.parametrize("task", ["GPT", "BERT"])
def test_trains_as_in_fp32(tmp_path: Path, task: str) -> None:
    single = run(tmp_path / "fp32", "", task=task)
    half = run(tmp_path / "fp16", "--fp16 --initial-loss-scale 65536", task=task)
    for theirs, mine in zip(single, half, strict=True):
        for name in ("lm loss", "sop loss", "grad norm"):
            if name in theirs:
                assert mine[name] == pytest.approx(theirs[name], rel=1e-2), (mine["iteration"], name)
        assert mine["loss scale"] == 65536 and mine["skipped iterations"] == 0
        assert "loss scale" not in theirs


def test_the_scale_matches_megatron(tmp_path: Path) -> None:
    rows = run(tmp_path / "metrics", DYNAMIC)
    plain = PlainScale(window=2, hysteresis=3)
    for row in rows:
        assert row["loss scale"] == plain.step(row["skipped iterations"] == 1)
        assert (row["grad norm"] is None) == (row["skipped iterations"] == 1)
        assert row["lm loss"] < 7  # logged unscaled
    skipped = [row["skipped iterations"] for row in rows]
    assert 8 < sum(skipped) < 22 and set(skipped) == {0, 1}
    assert any(b > a for a, b in itertools.pairwise(row["loss scale"] for row in rows))


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """Metrics of one process with `OVERFLOWS`."""
    return run(tmp_path_factory.mktemp("one") / "m", SMALL, overflows=OVERFLOWS)


@pytest.mark.parametrize(
    ("processes", "layout"),
    [
        (4, f"{TP} 2 {ZERO}"),
        pytest.param(2, f"{TP} 2 {SP}", marks=pytest.mark.slow),
        pytest.param(2, f"{PP} 2 {CHUNKS} 1", marks=pytest.mark.slow),
        pytest.param(2, ZERO, marks=pytest.mark.slow),
        pytest.param(2, ZERO2, marks=pytest.mark.slow),
        pytest.param(2, f"{ZERO3} --recompute-granularity full", marks=pytest.mark.slow),
        pytest.param(4, f"{ZERO3} {TP} 2 {SP}", marks=pytest.mark.slow),
        pytest.param(4, f"{TP} 2 {PP} 2", marks=pytest.mark.slow),
    ],
)
def test_layouts_agree(one_process: list[dict], tmp_path: Path, processes: int, layout: str) -> None:
    """All ranks skip an overflow of one rank and keep the same scale."""
    flags = f"{SMALL} {layout} --metrics-path {tmp_path}/m"
    run_distributed(train, processes, flags, "GPT", OVERFLOWS)
    plain = PlainScale(1024.0, window=2)
    for one, other in zip(one_process, metrics(tmp_path / "m"), strict=True):
        overflow = one["iteration"] in OVERFLOWS
        scale = plain.step(overflow)
        for row in (one, other):
            assert (row["loss scale"], row["skipped iterations"]) == (scale, overflow), one["iteration"]
        assert other["lm loss"] == pytest.approx(one["lm loss"], rel=1e-2)


def assert_resumes_exactly(tmp_path: Path, start, flags: str) -> None:
    """Check that a run stopped within hysteresis resumes exactly."""
    flags = f"{DYNAMIC} {flags} --train-iters 12 --attention-dropout 0.1 --hidden-dropout 0.1"
    paths = f"--save {tmp_path}/%s --load {tmp_path}/%s --metrics-path {tmp_path}/%s.jsonl"
    start(f"{flags} {paths.replace('%s', 'whole')}")
    start(f"{flags} {paths.replace('%s', 'parts')} --exit-interval 2")
    state = json.loads((tmp_path / "parts" / "iter_0000002" / "state.json").read_text())
    assert state["loss_scaler"] == {"scale": 2.0**32, "clean": 0, "patience": 1}
    start(f"{flags} {paths.replace('%s', 'parts')}")
    assert metrics(tmp_path / "parts.jsonl") == metrics(tmp_path / "whole.jsonl")
    files = sorted((tmp_path / "whole" / "iter_0000012").glob("*.safetensors"))
    assert files
    for path in files:
        assert path.read_bytes() == (tmp_path / "parts" / "iter_0000012" / path.name).read_bytes()


def test_resumes_bit_for_bit_within_hysteresis(tmp_path: Path) -> None:
    assert_resumes_exactly(tmp_path, train, "")


@pytest.mark.slow
@pytest.mark.parametrize("layout", [f"{TP} 2 {SP}", f"{ZERO2} --async-save", f"{ZERO3} --async-save"])
def test_two_processes_resume_bit_for_bit_within_hysteresis(tmp_path: Path, layout: str) -> None:
    assert_resumes_exactly(tmp_path, lambda flags: run_distributed(train, 2, flags), layout)


def test_an_overflow_at_the_lowest_scale_is_a_fault(tmp_path: Path) -> None:
    """Either the scale is at its minimum or it is fixed; the last checkpoint precedes the overflow."""
    save = f"--save {tmp_path / 'a'} --log-interval 8"
    limits = f"--initial-loss-scale {2**32} --min-loss-scale {2**30} --hysteresis 1"
    fault = train(f"--fp16 {limits} {save}")
    assert fault.startswith(
        "iteration 3: the loss or its gradient is not finite at a loss scale of 1.07374e+09, which cannot be "
        f"lowered; no weights were changed, and {tmp_path / 'a'} holds them as of iteration 2. Recomputed, it is "
        "not finite again"
    )
    state = json.loads((tmp_path / "a" / "iter_0000002" / "state.json").read_text())
    assert state["loss_scaler"] == {"scale": 2.0**30, "clean": 0, "patience": 0}
    fault = train("--fp16 --loss-scale 1e10")
    assert fault.startswith("iteration 1: ") and "longer warm-up, or a lower --loss-scale, or skip" in fault


def test_skipping_ends_after_ten_overflows_at_the_lowest_scale() -> None:
    fault = train("--fp16 --on-non-finite skip --loss-scale 1e10")
    assert fault.startswith("iteration 10: no finite gradient for 10 iterations in a row")


def test_the_log_has_the_scale_and_the_skipped_iterations() -> None:
    stdout = train(f"{DYNAMIC} --train-iters 4 --log-interval 4 --spike-skip 6 --log-format megatron")
    (line,) = [line for line in stdout.splitlines() if line.startswith(" iteration")]
    assert "| loss scale: 1073741824.0 |" in line and ", fp16\n" in stdout
    assert "| number of skipped iterations:   4 | number of nan iterations:   0 |" in line
