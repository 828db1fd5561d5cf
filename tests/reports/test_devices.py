"""Peak FLOP/s of devices, from data sheets and measured, and memory use."""

from __future__ import annotations

import json
import mmap
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from distributed import run_distributed
from models import CPU

from megatron.ops.linear import matmul
from megatron.parallel.config import ParallelConfig
from megatron.parallel.mesh import Mesh, init_mesh
from megatron.reports import devices
from megatron.reports.devices import (
    find_peak,
    max_memory,
    measured_peak,
    memory_by_rank,
    memory_lines,
    memory_use,
)


def test_a_cpu_is_measured_in_half_a_second() -> None:
    measured_peak.cache_clear()
    begin = time.perf_counter()
    peak = find_peak(Mesh(device=CPU), matmul, torch.float32)
    assert time.perf_counter() - begin < 3  # with a margin for other load
    assert "measured" in peak.source
    x = torch.randn(512, 512)
    begin = time.perf_counter()
    x @ x
    assert peak.flops > 0.2 * 2 * 512**3 / (time.perf_counter() - begin)


def test_a_known_peak_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [lambda name, dtype: None, lambda name, dtype: {torch.bfloat16: 2e12}.get(dtype)]
    monkeypatch.setattr(devices, "PEAK_FLOPS", found)
    peak = find_peak(Mesh(device=CPU), matmul, torch.bfloat16)
    assert peak.flops == 2e12 and peak.source.startswith("data sheet of ")
    assert "measured" in find_peak(Mesh(device=CPU), matmul, torch.float32).source


def test_utilization_is_work_over_time_and_peak(pretrain: Callable[..., str], tmp_path: Path) -> None:
    """One layer, h = 16, s = 16, V = 128; micro batch size 2 with full recomputation."""
    flags = """
        --mock-data --tokenizer-type NullTokenizer --vocab-size 99 --num-layers 1 --hidden-size 16 --eval-iters 0
        --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 --train-iters 2 --lr 1e-3 --log-interval 1
        --num-workers 0 --device cpu --recompute-granularity full
    """.split()
    out = pretrain(*flags, "--metrics-path", tmp_path / "metrics.jsonl", "--log-level", "debug")
    (reported,) = re.findall(r"^peak per device: ([\d.e-]+) TFLOP/s in fp32 \(measured.*\)$", out, re.M)
    record = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    s, h, vocabulary = 16, 16, 128
    layer, square, logits = 24 * s * h**2, 4 * s**2 * h, 2 * s * h * vocabulary
    half = square * (s + 1) / (2 * s)
    model, exact = 3 * (layer + square + logits), 3 * (layer + half + logits) + layer + half
    assert record["TFLOP/s per device"] * 1e12 * record["seconds per iteration"] == pytest.approx(2 * model)
    assert record["hfu"] / record["mfu"] == pytest.approx(exact / model, rel=1e-12)
    assert record["TFLOP/s per device"] / record["mfu"] == pytest.approx(float(reported), rel=1e-2)
    assert f"  MFU {record['mfu']:.1%}  ETA 0s" in out.splitlines()[-1]


def test_memory_of_a_cpu_is_that_of_the_process() -> None:
    before, size = memory_use(CPU), 64 << 20
    with mmap.mmap(-1, size) as block:  # not from malloc, which may reuse memory freed by other tests
        block.write(b"1" * size)
        after = memory_use(CPU)
    assert after["allocated"] - before["allocated"] >= 0.9 * size
    assert after["max allocated"] >= after["allocated"]


def memory_of(layout: str) -> tuple[str, dict[str, int]]:
    """Memory report and maxima where rank 1 holds 96 MiB more than rank 0."""
    config = ParallelConfig(**{layout: 2})
    with init_mesh(config, CPU) as mesh:
        block = torch.ones((96 << 20) * mesh.world.rank, dtype=torch.uint8)
        reported = memory_lines(memory_by_rank(mesh), 3), max_memory(mesh)
        del block
        return reported


def test_memory_of_one_replica_and_maximum_of_all_ranks() -> None:
    (reported, most), (_, same) = run_distributed(memory_of, 2, "pipeline_model_parallel_size")
    pattern = (
        r"\[Rank (\d)\] \(after 3 iterations\) memory \(MB\) \| allocated: ([\d.]+) \| max allocated: [\d.]+"
    )
    rows = [re.fullmatch(pattern, line).groups() for line in reported.splitlines()]
    assert [rank for rank, _ in rows] == ["0", "1"]
    assert float(rows[1][1]) - float(rows[0][1]) > 64
    assert most.keys() == {"mem-allocated-bytes", "mem-max-allocated-bytes"}
    assert most["mem-allocated-bytes"] == pytest.approx(float(rows[1][1]) * 2**20, rel=0.1)
    assert most == same


def test_a_run_logs_memory_for_debugging_or_at_every_interval(
    pretrain: Callable[..., str], tmp_path: Path
) -> None:
    flags = """
        --mock-data --tokenizer-type NullTokenizer --vocab-size 99 --num-layers 1 --hidden-size 16 --eval-iters 0
        --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 --train-iters 3 --lr 1e-3 --log-interval 1
        --num-workers 0 --device cpu --log-memory-to-tensorboard --log-level debug
    """.split()
    out = pretrain(*flags, "--metrics-path", tmp_path / "metrics.jsonl").splitlines()
    (line,) = [i for i, line in enumerate(out) if " memory (MB) | allocated: " in line]
    assert " 1/3  loss " in out[line - 1].replace("  1/", " 1/")
    for row in (tmp_path / "metrics.jsonl").read_text().splitlines():
        assert json.loads(row)["mem-max-allocated-bytes"] > 2**20
