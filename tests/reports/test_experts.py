"""Reported values of mixtures of experts: independent of the layout, in every destination, and a warning."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from distributed import free_port, run_distributed
from models import CPU, config_of, engine_of

from megatron.errors import InputError
from megatron.model.moe_config import MoEConfig
from megatron.parallel.mesh import init_mesh
from megatron.pretrain_gpt import GPT
from megatron.reports.experts import ExpertReport, dead_experts, layer_values
from megatron.reports.page import report_page
from megatron.reports.record import read_record
from megatron.reports.writers import tag_of
from megatron.tokenizer.null import NullTokenizer

MOE = """
    --num-experts 4 --moe-ffn-hidden-size 24 --disable-bias-linear --moe-layer-freq [0,1,1,1] --micro-batch-size 1
    --global-batch-size 4 --moe-router-load-balancing-type seq_aux_loss global_aux_loss --moe-aux-loss-coeff 0.5 0.1
    --moe-z-loss-coeff 0.01 --moe-expert-capacity-factor 1.0 --moe-per-layer-logging --hidden-dropout 0
    --attention-dropout 0
"""
LAYOUTS = [
    "--tensor-model-parallel-size 2",
    "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1 "
    "--expert-model-parallel-size 2 --recompute-granularity full --moe-layer-recompute",
    "--micro-batch-size 2",
    "--expert-model-parallel-size 2",
    "--pipeline-model-parallel-size 2",
]


def reported(flags: str) -> dict[str, float]:
    """Values after two steps on the same samples, of this process's share of the run."""
    config = config_of(f"{MOE} {flags}")
    samples = GPT.build_datasets(config, NullTokenizer(59), (8, 0, 0))["train"]
    with init_mesh(config.parallel, CPU) as mesh:
        engine, hook = engine_of(mesh, config), ExpertReport()
        trainer: Any = SimpleNamespace(config=config, mesh=mesh, engine=engine, log=lambda _: None)
        hook.during_run(trainer)
        size, replicas = config.training.micro_batch_size, mesh.dp.size
        starts = range(mesh.dp.rank * size, 8, replicas * size)
        batches = (samples.collate([samples[i] for i in range(start, start + size)]) for start in starts)
        interval: Any = SimpleNamespace(values={}, iterations=2)
        for step in range(2):
            engine.train_step(
                batches,
                num_microbatches=4 // (replicas * size),
                consumed_samples=4 * step,
                lr=1e-2,
                weight_decay=0.0,
            )
        hook.before_report(trainer, interval)
        assert not hook.sums.any()
        return interval.values


def in_layouts(ports: list[int]) -> list[dict[str, float]]:
    found = []
    for flags, port in zip(LAYOUTS, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        found.append(reported(flags))
    return found


def test_values_do_not_depend_on_the_layout() -> None:
    one = reported("")
    names = ["load max/mean", "idle experts share", "router entropy", "dropped share", "z_loss"]
    names += ["seq_aux_loss", "global_aux_loss"]
    layers = [f"moe {name} layer {layer}" for name, layer in itertools.product(names, (1, 2, 3))]
    assert set(one) == {f"moe {name}" for name in names} | set(layers)
    assert 0 < one["moe dropped share"] < 1 < one["moe load max/mean"] < 4
    assert one["moe seq_aux_loss"] >= 1 and one["moe z_loss"] > 0 and 0 < one["moe router entropy"] < 1.3863
    for ranks in run_distributed(in_layouts, 2, [free_port() for _ in LAYOUTS]):
        for flags, values in zip(LAYOUTS, ranks, strict=True):
            assert values == pytest.approx(one, rel=2e-5), flags


def test_values_of_a_layer() -> None:
    config = MoEConfig(num_experts=4, moe_aux_loss_coeff=(0.1,))
    sums = {"load": [6.0, 0.0, 8.0, 2.0], "entropy": 4.0, "sequences": 2.0, "dropped": 0.0, "aux_loss": 3.0}
    assert layer_values(sums, config) == {
        "load max/mean": 2.0,
        "idle experts share": 0.25,
        "router entropy": 0.5,  # 16 copies of 8 tokens
        "aux_loss": 1.5,
    }


def test_tags() -> None:
    assert tag_of("moe load max/mean") == "moe/load-max/mean"
    assert tag_of("moe z_loss layer 3") == "moe/z_loss-layer-3"


def test_a_warning_names_few_layers() -> None:
    line = dead_experts({layer: [1, 3] for layer in range(9)} | {2: []}, 8, 10)
    assert line.startswith(
        "warning: experts without a token in the last 10 iterations: layer 0: 2 of 8, layer 1:"
    )
    assert "layer 4: 2 of 8, and in 4 more layers; if" in line and "layer 2" not in line


FLAGS = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 59 --num-layers 2 --hidden-size 16 --num-attention-heads 2
    --seq-length 16 --micro-batch-size 2 --train-iters 12 --lr 1e-3 --device cpu --log-interval 1 --num-workers 0
    --eval-iters 0 --num-experts 64 --moe-ffn-hidden-size 8 --disable-bias-linear --moe-z-loss-coeff 0.01
"""


def test_a_run_reports_and_warns(pretrain: Callable[..., str], tmp_path: Path) -> None:
    printed = pretrain(*FLAGS.split(), "--save", tmp_path)
    # 64 copies cannot reach 64 experts evenly.
    assert printed.count("warning: experts without a token in the last 1 iterations: layer 0: ") >= 1
    assert "; 2 layers, hidden size 16, 2 heads, 64 experts, 2 of them for each token, vocabulary" in printed
    assert "expert load " in printed and "per active parameter" in printed
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["moe z_loss"] == pytest.approx(4.16**2, rel=0.05)  # ln 64, squared
    assert 0 < rows[0]["moe idle experts share"] < 1 and not any("layer" in name for name in rows[0])
    page = report_page([read_record(tmp_path)])
    assert "<h2>moe load max/mean</h2>" in page and "<h2>moe z_loss</h2>" in page


def test_the_flag_needs_experts() -> None:
    with pytest.raises(InputError, match=r"^--moe-per-layer-logging needs --num-experts$"):
        config_of("--moe-per-layer-logging")
