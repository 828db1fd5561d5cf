"""Compare the planner's predictions of mixtures of experts with published runs.

    python benchmarks/planner_mixtures.py [--check]

Reads benchmarks/published_mixtures.json: runs of Megatron-LM by NVIDIA in which all experts get equally many tokens,
without context parallelism and multi-token prediction. Writes the table of docs/scaling.md. No constant of the planner
is fitted to these runs.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron.cli import Parser, add_flags, make_config, run_command
from megatron.errors import InputError
from megatron.flags import Config, flag
from megatron.model.config import ModelConfig
from megatron.planner.cluster import NETWORK_LATENCY, NVLINK_LATENCY, Cluster, Link, device_from_data_sheet
from megatron.planner.device_specs import data_sheet
from megatron.planner.layout import OURS, Job, Layout
from megatron.planner.memory import fits, max_memory
from megatron.planner.simulate import Simulator

BEGIN, END = "<!-- made by python benchmarks/planner_mixtures.py -->\n", "<!-- end of mixtures -->\n"
ROWS, PAGE = ROOT / "benchmarks/published_mixtures.json", ROOT / "docs/scaling.md"
# Name in the planner, GPUs of a job that NVLink joins, and GB/s of a GPU's network adapter. Jobs use 64 of the 72 GPUs
# of an NVL72.
GPUS = {
    "h100": ("h100-80gb", 8, 50),
    "b200": ("b200-180gb", 8, 50),
    "b300": ("b300-288gb", 8, 100),
    "gb200": ("gb200-186gb", 64, 50),
    "gb300": ("gb300-279gb", 64, 100),
}
COMMON: dict[str, Any] = {
    "swiglu": True,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "moe_grouped_gemm": True,
}
QWEN: dict[str, Any] = {
    "group_query_attention": True,
    "num_query_groups": 4,
    "kv_channels": 128,
    "qk_layernorm": True,
    "num_experts": 128,
    "moe_router_topk": 8,
}
# Vocabulary, and fields of the model besides its layers.
MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "Qwen3 30B a3B": (
        151936,
        QWEN | {"hidden_size": 2048, "num_attention_heads": 32, "moe_ffn_hidden_size": 768},
    ),
    "Qwen3 235B a22B": (
        151936,
        QWEN | {"hidden_size": 4096, "num_attention_heads": 64, "moe_ffn_hidden_size": 1536},
    ),
    "Grok-1-314B": (
        131072,
        {
            "hidden_size": 6144,
            "num_attention_heads": 48,
            "ffn_hidden_size": 32768,
            "group_query_attention": True,
            "num_query_groups": 8,
            "num_experts": 8,
        },
    ),
    "DeepSeekV3": (
        129280,
        {
            "hidden_size": 7168,
            "num_attention_heads": 128,
            "ffn_hidden_size": 18432,
            "multi_latent_attention": True,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_layernorm": True,
            "num_experts": 256,
            "moe_router_topk": 8,
            "moe_ffn_hidden_size": 2048,
            "moe_layer_freq": "[0]*3+[1]*58",
            "moe_shared_expert_intermediate_size": 2048,
            "moe_router_score_function": "sigmoid",
        },
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkConfig(Config):
    """Options of the benchmark."""

    check: bool = flag(False, "fail if the table is out of date; writes nothing")


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    add_flags(parser, BenchmarkConfig, "benchmark")
    config = make_config(BenchmarkConfig, vars(parser.parse_args(argv)))
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    made = before + BEGIN + table(json.loads(ROWS.read_text(encoding="utf-8"))) + END + rest.split(END)[1]
    if config.check and made != text:
        raise InputError("docs/scaling.md is not up to date; run python benchmarks/planner_mixtures.py")
    if not config.check:
        PAGE.write_text(made, encoding="utf-8")


def table(rows: list[dict[str, Any]]) -> str:
    """A row for each published run, and the errors of the step's time."""
    lines = ["| model | GPUs | layout | published s | predicted s | error |", "|---|---|---|---|---|---|"]
    errors = []
    for row in rows:
        layout, seconds, recomputed = predict(row)
        errors.append(seconds / row["seconds"] - 1)
        model = row["model"] + (f", {row['layers']} layers" if row["model"] == "Grok-1-314B" else "")
        products = "FP8" if row["fp8"] else "bf16"
        lines.append(
            f"| {model} | {row['gpus']} {row['gpu'].upper()}, {products} | {layout}{recomputed} | "
            f"{row['seconds']:.1f} | {seconds:.1f} | {errors[-1]:+.0%} |"
        )
    mean, median = statistics.mean(map(abs, errors)), statistics.median(errors)
    return "\n".join(lines) + (
        f"\n\nOver the {len(rows)} runs the mean absolute error of the time of a step is {mean:.0%}, the median error "
        f"{median:+.0%}.\n"
    )


def predict(row: dict[str, Any]) -> tuple[Layout, float, str]:
    """The layout of a published run, the predicted seconds of its step, and recomputation of experts in words.

    The tables do not say what was recomputed: nothing if it fits, or else the experts, or else whole layers.
    """
    vocab, fields = MODELS[row["model"]]
    model = ModelConfig(
        num_layers=row["layers"], max_position_embeddings=row["seq_length"], **COMMON, **fields
    )
    fp8 = "hybrid" if row["fp8"] else None
    job = Job(model, row["seq_length"], vocab, row["global_batch_size"], fp8)
    tensor, pipeline = row["tensor"], row["pipeline"]
    layout = Layout(
        tensor=tensor,
        pipeline=pipeline,
        data=row["gpus"] // (tensor * pipeline),
        expert=row["expert"],
        expert_tensor=row["expert_tensor"],
        chunks=row["chunks"],
        micro_batch_size=row["micro_batch_size"],
        sequence_parallel=tensor > 1,
        distributed_optimizer=True,
        overlap_grad_reduce=True,
    )
    if not layout.splits_layers(job):  # chunks of different length
        layout = dataclasses.replace(layout, chunks=1)
    machine = cluster(row["gpu"], row["gpus"])
    choices = (("none", False), ("none", True), ("full", False))
    for recompute, experts in choices:
        tried = dataclasses.replace(job, model=dataclasses.replace(model, moe_layer_recompute=experts))
        layout = dataclasses.replace(layout, recompute=recompute)
        if fits(max_memory(tried, layout, machine, OURS), machine):
            break
    seconds = Simulator(tried, layout, machine, OURS).step().seconds
    return layout, seconds, ", recomputed experts" if experts else ""


def cluster(gpu: str, devices: int) -> Cluster:
    """A cluster of so many GPUs."""
    name, per_node, network = GPUS[gpu]
    sheet = data_sheet(name, where="gpu")
    return Cluster(
        device=device_from_data_sheet(sheet),
        devices=devices,
        per_node=min(per_node, devices),
        link=Link(sheet.link / 2 * 1e9, NVLINK_LATENCY),
        network=Link(network * 1e9, NETWORK_LATENCY),
    )


if __name__ == "__main__":
    run_command(main)
