"""Published runs as inputs of the planner: rows with `gpus`, and rows with `num_gpus` (the form of Megatron Bridge)."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bridge_models import model_of
from bridge_recipes import division, expert_ranks, named, program_name, properties, release

from megatron.errors import InputError
from megatron.model.config import ModelConfig
from megatron.planner.cluster import (
    NETWORK_LATENCY,
    NVLINK_LATENCY,
    Cluster,
    Link,
    device_from_data_sheet,
)
from megatron.planner.device_specs import DataSheet, data_sheet
from megatron.planner.layout import Job, Layout
from megatron.planner.profiles import Profile, find_profile, with_constants

# Name in the planner, GPUs that NVLink joins (64 of the 72 of an NVL72), and GB/s of a GPU's network adapter.
GPUS = {
    "h100": ("h100-80gb", 8, 50),
    "h200": ("h200-141gb", 8, 50),
    "a100": ("a100-80gb", 8, 25),
    "b200": ("b200-180gb", 8, 50),
    "b300": ("b300-288gb", 8, 100),
    "gb200": ("gb200-186gb", 64, 50),
    "gb300": ("gb300-279gb", 64, 100),
}
# PFLOP/s of dense FP4 products by the data sheets. On B300 0.77 of these: Llama 405B gains 1.21 over GB200 both in
# FP8, whose peak is the same, and in NVFP4, whose peak is 1.5 times as high.
FP4 = {"b200": 9.0, "gb200": 10.0, "b300": 10.4, "gb300": 11.5}
# The planner takes its fastest choice that fits for what a row leaves open.
MICRO_BATCH_SIZES, MAX_CHUNKS = (1, 2, 4, 8), 8

# Month and day from which on BLOOM's layouts were tuned in bf16, by its chronicle.
BLOOM_BF16 = "0228"
# Words for runs of NeMo-Megatron-Launcher before sequence parallelism and selective recomputation. By the README at
# 3579cdb these gave 15%, and 175B takes 27 days for 300 billion tokens on 1,024 GPUs, 15% less than by its table.
OLDER = "whether the measured run had them"
# llm-foundry's table of A100 40GB is older than the others (README at 1ef7b4d): of torch 1.13, whose checkpoints repeat
# a whole layer, and with gradients reduced in bf16 (PURE).
TORCH_1_13 = {"stops_recomputing": False, "reduced": 2}
# Microbatches of a replica in AutoModel's pipelines, which run several times in a step if that has more: the local
# batch of its table (docs/performance-summary.mdx).
AUTOMODEL_MICROBATCHES = 8
# Words for torchtitan's selective recomputation of every second matrix product.
SELECTIVE = ("selective op", "per op SAC")

# Values of fields that rows of each format leave out.
RUN_DEFAULTS: dict[str, Any] = {
    "id": "-",
    "group": "-",
    "note": "",
    "program": "ours",
    "precision": "bf16",
    "layout": None,
    "cluster": None,
    "flops_recompute": "none",
    "fsdp": False,
    "oom": False,
    "exact": False,
}
BRIDGE_DEFAULTS: dict[str, Any] = {
    "id": "-",
    "model_name": "-",
    "program": "Megatron-Core",
    "source": {},
    "precision": "BF16",
    "recompute": "",
    "notes": "",
}
LAYOUT_DEFAULTS = {"tp": 1, "pp": 1, "cp": 1}
SHAPE_DEFAULTS: dict[str, Any] = {"swiglu": True, "first_dense_layers": 0, "shared_expert_ffn": 0}


@dataclasses.dataclass(frozen=True)
class Row:
    """A published run.

    Attributes:
        group: rows whose mean error is printed together.
        family: the model, or a set of models of one source, that --fit leaves out in turn.
        seconds: of a step; None if it ran out of memory.
        layouts: the published layout, or several if the row leaves something open.
        passes: of a pipeline in a step, each with its own fill and drain.
        offload: activations are kept in the host's memory.
        recomputes_experts: it may recompute whole mixtures, if nothing says otherwise.
        exact: the row states everything that the planner needs, and the planner has everything it states.
    """

    name: str
    group: str
    family: str
    job: Job
    layouts: tuple[Layout, ...]
    cluster: Cluster
    profile: Profile
    seconds: float | None
    exact: bool
    passes: int = 1
    offload: bool = False
    recomputes_experts: bool = True

    @property
    def fitted(self) -> bool:
        return self.name in self.profile.constants.fitted


def read_rows(path: Path) -> Iterator[Row | str]:
    """Yield the rows of a file; for a row that the planner cannot express its name and the reason.

    Raises:
        InputError: names the file and the line that is not a row.
    """
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
            rows = _expand(values) if "columns" in values else [{**values}]
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"--rows {path}: line {number} is not a row: {error!r}") from None
        for row in rows:
            try:
                yield _run(row) if "gpus" in row else _bridge_run(row)
            except (NotExpressed, InputError) as reason:
                yield f"{row.get('id', number)}: {reason}"
            except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
                yield f"{row.get('id', number)}: missing or unknown: {error}"


def _expand(table: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of a table: {"common": fields of all rows, "columns": names, "rows": values}; "a.b" is field b of a."""
    rows = []
    for values in table["rows"]:
        row = copy.deepcopy(table["common"])
        for name, value in zip(table["columns"], values, strict=True):
            *outer, last = name.split(".")
            within = row
            for part in outer:
                within = within.setdefault(part, {})
            within[last] = value
        rows.append(row)
    return rows


class NotExpressed(Exception):
    """The planner has no words for something in a row."""


def _given(fields: dict[str, Any] | None) -> dict[str, Any]:
    """Fields that have a value."""
    return {name: value for name, value in (fields or {}).items() if value is not None}


def fp8_format(precision: str) -> str | None:
    """The planner's FP8 format of a row's precision; None for bf16 and fp16. NVFP4 counts as a faster FP8."""
    return "hybrid" if any(name in precision.upper() for name in ("FP8", "FLOAT8", "FP4")) else None


def _run(row: dict[str, Any]) -> Row:
    """A row with `gpus`."""
    row = RUN_DEFAULTS | _given(row)
    model = ModelConfig(**({"max_position_embeddings": row["seq"]} | _given(row["model"])))
    if layers := re.match(r"(\d+) layers and two embeddings", row["note"]):  # of which each counts as a layer
        model = dataclasses.replace(model, num_layers=int(layers[1]))
    job = Job(model, row["seq"], row["vocab"], row["gbs"], fp8_format(row["precision"]))
    sheet = data_sheet(row["gpu"], where="gpu")
    given = _given(row["cluster"])
    node, network = sheet.node or (8, 0)
    per_node = given.get("per_node", node)
    network = given.get("network_gbps_node", network * 8) / 8
    cluster = _cluster(sheet, row["gpus"], per_node, network / per_node)
    device = cluster.device
    if "memory_gb" in given:
        device = dataclasses.replace(device, memory=given["memory_gb"] * 1e9)
    if "bandwidth_gbs" in given:
        device = dataclasses.replace(device, bandwidth=given["bandwidth_gbs"] * 1e9)
    cluster = dataclasses.replace(cluster, device=device)
    program = _program(row["program"], row["group"], row["id"], row["fsdp"])
    profile = find_profile(program, sheet.name)
    if (program, sheet.name) == ("llm-foundry", "a100-40gb"):
        profile = dataclasses.replace(profile, program=dataclasses.replace(profile.program, **TORCH_1_13))
    values = _given(row["layout"])
    if values:
        free = values.pop("free", False)
        if (
            row["fsdp"]
            and values.get("recompute", "none") == "none"
            and any(word in row["note"] for word in SELECTIVE)
        ):
            values["recompute"] = "selective"
        if OLDER in row["note"]:
            values |= {"recompute": "full", "sequence_parallel": False}
        layout = Layout(**values, sharded_parameters=row["fsdp"])
        layouts = tuple(_choices(job, layout)) if free else (layout,)
    else:
        layouts = tuple(_shapes(job, cluster))
    seconds = row.get("published_step_s")
    if "published_tflops" in row:
        seconds = job.flops(recompute=row["flops_recompute"]) / (row["published_tflops"] * 1e12 * row["gpus"])
    if seconds is None and not row["oom"]:
        raise NotExpressed("no time of a step")
    return Row(
        name=str(row["id"]),
        group=row["group"] + (" FP8" if job.fp8_format else ""),
        family=row["group"],
        job=job,
        layouts=layouts,
        cluster=with_constants(cluster, profile.constants),
        profile=profile,
        seconds=None if row["oom"] else seconds,
        exact=bool(row["exact"] and len(layouts) == 1),
    )


def _program(program: str, group: str, name: str, sharded: bool) -> str:
    """The planner's name for the program of a row."""
    if program == "ours":
        if not sharded:  # dgxc-benchmarking's runs are of releases before 25.09
            return "nemo-2025" if "dgxc" in group else "megatron-core"
        return "torchtitan" if "torchtitan" in group else "llm-foundry"
    if "BLOOM" in group:  # by the month and day in the name
        tuned = re.match(r"bloom-(\d{4})", name)
        return f"megatron-deepspeed-{'fp16' if tuned and tuned[1] < BLOOM_BF16 else 'bf16'}"
    if any(name in group for name in ("JZ", "MT-NLG", "NeoX")):
        return "megatron-deepspeed"
    return program.replace("_", "-")


def _cluster(sheet: DataSheet, devices: int, per_node: int, network: float) -> Cluster:
    """A cluster of so many GPUs, each with `network` GB/s to other nodes."""
    return Cluster(
        device=device_from_data_sheet(sheet),
        devices=devices,
        per_node=min(per_node, devices),
        link=Link(sheet.link / 2 * 1e9, NVLINK_LATENCY),
        network=Link(network * 1e9, NETWORK_LATENCY),
    )


def _choices(job: Job, layout: Layout) -> Iterator[Layout]:
    """Yield a layout with each microbatch size and number of chunks that divide the job."""
    for size, chunks in itertools.product(MICRO_BATCH_SIZES, range(1, MAX_CHUNKS + 1)):
        other = dataclasses.replace(layout, micro_batch_size=size, chunks=chunks)
        per_step = layout.data * size
        if job.global_batch_size % per_step or not other.splits_layers(job):
            continue
        if chunks > 1 and (layout.pipeline == 1 or other.microbatches(job) % layout.pipeline):
            continue
        yield from (dataclasses.replace(other, recompute=recompute) for recompute in ("none", "full"))


def _shapes(job: Job, cluster: Cluster) -> Iterator[Layout]:
    """Yield the layouts within a node and over stages that the planner would search, with context parallelism."""
    for tensor, pipeline, context in itertools.product((1, 2, 4, 8), (1, 2, 4, 8, 9, 16), (1, 2)):
        data, rest = divmod(cluster.devices, tensor * pipeline * context)
        if rest or not data or job.global_batch_size % data:
            continue
        yield from _choices(
            job,
            Layout(
                tensor=tensor,
                context=context,
                pipeline=pipeline,
                data=data,
                sequence_parallel=tensor > 1,
                distributed_optimizer=True,
                overlap_grad_reduce=True,
            ),
        )


def _bridge_run(row: dict[str, Any]) -> Row:
    """A row with `num_gpus`."""
    shape, split = _given(row["model"]), LAYOUT_DEFAULTS | _given(row.get("layout"))
    if shape.get("kind", "dense") not in ("dense", "moe"):
        raise NotExpressed(f"a model of kind {shape['kind']}")
    shape = SHAPE_DEFAULTS | {"kind": "moe" if "experts" in shape else "dense"} | shape
    shape = {"head_dim": shape["hidden"] // shape["heads"], "kv_heads": shape["heads"]} | shape
    row = BRIDGE_DEFAULTS | _given(row) | {"model": shape, "layout": split}
    found = re.search(r"\b(" + "|".join(GPUS) + r")\b(.*)", row["gpu"].lower())
    if found is None:
        raise NotExpressed(f"GPU {row['gpu']}")
    gpu, form = found.groups()
    row |= {"gpu": gpu, "model_name": named(row["model_name"])}
    cluster, fp8 = _bridge_cluster(row, form), fp8_format(row["precision"])
    job = Job(
        model_of(row["model_name"], shape, row["seq_length"]),
        row["seq_length"],
        shape["vocab"],
        row["global_batch_size"],
        fp8,
    )
    layout, passes = _bridge_layout(row)
    layouts = _bridge_layouts(row, job, layout)
    profile = find_profile(program_name(row), cluster.device.name)
    kind = "mixtures" if shape["kind"] == "moe" else "dense"
    changed = dataclasses.replace(profile.program, **properties(row))
    profile = dataclasses.replace(profile, program=changed)
    seconds = row.get("step_time_s")
    if seconds is None:
        if "tokens_per_s_per_gpu" not in row:
            raise NotExpressed("no time of a step")
        tokens = row["global_batch_size"] * row["seq_length"]
        seconds = tokens / (row["tokens_per_s_per_gpu"] * row["num_gpus"])
    return Row(
        name=str(row["id"]),
        group=f"{gpu.upper()} {profile.name} {kind} {'BF16' if fp8 is None else 'FP8'}",
        family=row["model_name"],
        job=job,
        layouts=layouts,
        cluster=with_constants(cluster, profile.constants),
        profile=profile,
        seconds=seconds,
        exact=shape["kind"] == "dense" and len(layouts) == 1 and not split.get("fsdp_shard"),
        passes=passes,
        offload=layout.sharded_parameters and gpu.startswith("gb"),
        # NVIDIA's recipes since then recompute some modules only: mla_up_proj, moe_act, layernorm, the dense mlp.
        recomputes_experts=release(row) < "25.11",
    )


def _bridge_cluster(row: dict[str, Any], form: str) -> Cluster:
    """The cluster of a row whose GPU has this form, such as 96gb-hbm2e-500w."""
    name, per_node, network = GPUS[row["gpu"]]
    cluster = _cluster(data_sheet(name, where="gpu"), row["num_gpus"], per_node, network)
    device = cluster.device
    if "hbm2e" in form:  # "96gb-hbm2e-500w", torchtitan's H100
        device = dataclasses.replace(device, memory=96e9, bandwidth=2.4e12)
    if "FP4" in row["precision"].upper():
        device = dataclasses.replace(device, fp8=FP4[row["gpu"]] * 1e15)
    return dataclasses.replace(cluster, device=device)


def _bridge_layout(row: dict[str, Any]) -> tuple[Layout, int]:
    """The layout of a row without recomputation, and the passes of its pipeline in a step."""
    # Ranks that share a replica are those of the expert axis, so the source's counts of replicas differ.
    split = row["layout"]
    tensor, pipeline, context = split["tp"], split["pp"], split["cp"]
    data = row["num_gpus"] // (tensor * pipeline * context)
    sharded, program = split.get("fsdp_shard"), program_name(row)
    size = row.get("micro_batch_size") or 1
    if program == "torchtitan" and pipeline > 1:
        # The row's is the batch of a replica, divided into as many microbatches as there are stages. Parameters are not
        # sharded again after forward, and gradients are reduced after the last microbatch.
        size, sharded = max(size // pipeline, 1), None
    passes = 1
    if program == "automodel" and pipeline > 1:
        passes = max(1, row["global_batch_size"] // (data * size * AUTOMODEL_MICROBATCHES))
    layout = Layout(
        tensor=tensor,
        context=context,
        pipeline=pipeline,
        data=data,
        expert=expert_ranks(row) or 1,
        expert_tensor=split.get("etp") or 1,
        chunks=split.get("vp") or 1,
        division=division(row["model_name"], row["model"]["layers"], pipeline * (split.get("vp") or 1)),
        micro_batch_size=size,
        sequence_parallel=tensor > 1,
        distributed_optimizer=True,
        overlap_grad_reduce=True,
        sharded_parameters=bool(sharded),
        instances=data * context // sharded if sharded and (data * context) % sharded == 0 else 1,
    )
    return layout, passes


def _bridge_layouts(row: dict[str, Any], job: Job, layout: Layout) -> tuple[Layout, ...]:
    """The layouts that a row may have: with the recomputation and the division of experts that it states or allows."""
    text, shape = row["recompute"], row["model"]
    if row.get("micro_batch_size") is None:
        layouts = tuple(_choices(job, layout))
    elif text.startswith(("full", "policy")) and "block" not in text:
        layouts = (dataclasses.replace(layout, recompute="full"),)
    elif text.startswith("selective"):
        layouts = (dataclasses.replace(layout, recompute="selective"),)
    elif text.startswith("none") or (text.startswith("per recipe") and release(row) >= "25.11"):
        layouts = (layout,)  # the recipes for mixtures recompute some modules at most
    else:
        layouts = tuple(dataclasses.replace(layout, recompute=recompute) for recompute in ("none", "full"))
    if shape["kind"] == "moe" and expert_ranks(row) is None:
        ranks = layout.replicas * layout.tensor
        sizes = [e for e in range(1, shape["experts"] + 1) if shape["experts"] % e == ranks % e == 0]
        layouts = tuple(dataclasses.replace(x, expert=e) for x in layouts for e in sizes)
    return layouts
