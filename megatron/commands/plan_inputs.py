"""Inputs of `megatron plan`: its flags, and the job and the cluster that they describe."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from megatron.cli import make_config
from megatron.errors import InputError
from megatron.flags import Config, field_types, flag
from megatron.model.config import ModelConfig
from megatron.performance.config import FP8_FORMATS, check_fp8_model, check_grouped_products
from megatron.planner.cluster import Cluster, Device, cluster_from_data_sheet
from megatron.planner.description import read_cluster
from megatron.planner.device_specs import data_sheet
from megatron.planner.layout import Job
from megatron.planner.models import VOCAB_SIZE, Published
from megatron.planner.presets import find_preset
from megatron.planner.profiles import find_constants, with_constants
from megatron.planner.shape import given_devices
from megatron.planner.unplanned import check_model

A100_80GB = "a100-80gb"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanConfig(Config):
    """The model, the cluster and the files to write."""

    model: str | None = flag(
        None,
        "a published model, such as llama3-8b, instead of flags of its shape; an unknown name prints close ones",
        metavar="NAME",
    )
    gpus: int | None = flag(None, "number of GPUs (default: that of --model)", low=1, high=10**6)
    gpu: str | None = flag(
        None,
        f"type of GPU, in the standard nodes or racks for it (default: {A100_80GB}); an unknown name prints the list",
        metavar="NAME",
    )
    cluster: str | None = flag(
        None, "YAML description of a cluster, instead of --gpus and --gpu (docs/scaling.md)", metavar="FILE"
    )
    global_batch_size: int | None = flag(
        None,
        "samples per step (default: that of --model, or 4 million tokens if it is not known)",
        low=1,
        high=10**7,
    )
    seq_length: int | None = flag(None, "tokens per sample (default: that of --model)", low=1)
    fp8_format: str | None = flag(
        None, "plan a run with this flag: FP8 products in the layers", choices=FP8_FORMATS
    )
    vocab_size: int | None = flag(
        None, f"size of the vocabulary, before padding (default: that of --model, or {VOCAB_SIZE})", low=1
    )
    layout: str | None = flag(
        None,
        "plan these sizes instead of searching for the best, such as T8P8D4V12b1: tensor-, context- (C), pipeline-, "
        "data- and expert-parallel (E) sizes, chunks of a stage, microbatch size; the fastest schedule, sharding and "
        "recomputation that fit (default of D: what --gpus leaves; of others: 1)",
        metavar="SIZES",
    )
    tokens: float | None = flag(
        None, "tokens to train on, such as 300e9; prints days and GPU-hours", above=0, high=1e18
    )
    days: float | None = flag(
        None,
        "with --tokens, instead of --gpus: plan for the fewest GPUs that train within so many days",
        above=0,
        high=10**5,
    )
    gpu_hour_price: float | None = flag(
        None, "with --tokens: dollars for an hour of one GPU; prints the cost", above=0, high=10**4
    )
    gpu_watts: float | None = flag(
        None,
        "with --tokens: power of one GPU with its share of the machine; prints the energy",
        above=0,
        high=10**5,
    )
    gpu_hours_between_failures: float | None = flag(
        None,
        "mean time between failures of one GPU with its share of the machine, such as 50000; prints the best interval "
        "between checkpoints and the share of the time that is left for training",
        above=0,
        high=10**9,
    )
    checkpoint_seconds: float = flag(
        60.0, "seconds for which a checkpoint stops training", above=0, high=10**5
    )
    restart_minutes: float = flag(
        10.0, "minutes from a failure until training goes on from the last checkpoint", above=0, high=10**5
    )
    longest_seq_length: bool = flag(
        False, "also print the longest sample that fits the cluster in any layout"
    )
    what_if: bool = flag(
        False, "also print what a network twice as fast, twice the memory and so on would bring"
    )
    explain: bool = flag(False, "explain the plan with the takeaways of arXiv 2104.04473")
    json: str | None = flag(None, "write the plans and their predictions", metavar="FILE")
    trace: str | None = flag(
        None,
        "write the predicted step of the best or the given layout, for https://ui.perfetto.dev: computation, "
        "communication and memory of each stage",
        metavar="FILE",
    )
    picture: str | None = flag(None, "draw the best plan's schedule as .svg or .png", metavar="FILE")
    calibrate: str | None = flag(
        None,
        "measure this machine's GPUs or CPU in up to three minutes, write a file for --cluster, and exit; under "
        "torchrun also the network between machines",
        metavar="FILE",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("gpu_hour_price", "gpu_watts", "days"):
            if getattr(self, name) is not None and self.tokens is None:
                raise InputError(f"--{name.replace('_', '-')} needs --tokens")
        if self.days is not None and (self.gpus is not None or self.cluster is not None):
            raise InputError("--days: finds the number of GPUs; leave out --gpus and --cluster, or --days")
        if self.layout is not None and self.days is not None:
            raise InputError("--days: finds the layout; leave out --layout, or --days")
        if self.picture is not None and Path(self.picture).suffix not in (".svg", ".png"):
            raise InputError(f"--picture: {self.picture} must end with .svg or .png")


def make_job(config: PlanConfig, args: dict[str, Any]) -> Job:
    """Return the job: a named model, changed by other flags, or one from flags alone.

    Raises:
        InputError: there is no model; a size is missing; samples are longer than --max-position-embeddings; or the
            model is not planned, or not trained in FP8.
    """
    known: dict[str, Any] = {}
    seq_length, batch = config.seq_length, config.global_batch_size
    vocab_size = config.vocab_size or VOCAB_SIZE
    if config.model is not None:
        _, named = find_preset(config.model)
        if isinstance(named, Published):
            known = {
                "num_layers": named.layers,
                "hidden_size": named.hidden,
                "num_attention_heads": named.heads,
            }
        else:
            known, vocab_size = dict(named.fields), config.vocab_size or named.vocab_size
        seq_length = seq_length or named.seq_length
        batch = batch or named.batch(seq_length)
    elif "num_layers" not in args:
        raise InputError("--model or --num-layers is required")
    if seq_length is None or batch is None:
        name = "--seq-length" if seq_length is None else "--global-batch-size"
        raise InputError(f"{name} is required without --model")
    sizes = {"max_position_embeddings": seq_length, **known}
    model = make_config(ModelConfig, sizes | {k: v for k, v in args.items() if k in field_types(ModelConfig)})
    check_model(model)
    if config.fp8_format is not None:
        check_fp8_model(config.fp8_format, model, ranks=1)
    if seq_length > model.max_position_embeddings:
        raise InputError(
            f"--seq-length: {seq_length} is longer than --max-position-embeddings {model.max_position_embeddings}"
        )
    return Job(model, seq_length, vocab_size, batch, config.fp8_format)


def make_cluster(config: PlanConfig) -> Cluster:
    """Return the cluster.

    Raises:
        InputError: the number of devices is missing, the GPU is unknown, or the file is wrong.
    """
    if config.cluster is not None:
        for name, value in (("--gpus", config.gpus), ("--gpu", config.gpu)):
            if value is not None:
                raise InputError(
                    f"{name}: contradicts --cluster, whose file describes the devices; leave out one of the two"
                )
        return read_cluster(Path(config.cluster))
    in_layout = given_devices(config.layout) if config.layout else None
    gpus = config.gpus or in_layout or (find_preset(config.model)[1].gpus if config.model else None)
    if gpus is None:
        model = f"with --model {config.model}" if config.model else "without --model"
        size = f", or D in --layout {config.layout}," if config.layout else ""
        raise InputError(f"--gpus or --cluster{size} is required {model}")
    sheet = data_sheet(config.gpu or A100_80GB, where="--gpu")
    where = "--gpus" if config.gpus or not in_layout else f"--layout {config.layout}"
    return with_constants(cluster_from_data_sheet(sheet, gpus, where=where), find_constants(sheet.name))


def check_precision(job: Job, device: Device) -> None:
    """Check that the device's speed is known in the formats of a run, and that its products take the experts' sizes.

    Raises:
        InputError: it is not, or they do not.
    """
    if job.model.moe_grouped_gemm:
        check_grouped_products(job.model, device.precision, ranks=1)
    if job.fp8_format is not None and (device.fp8 is None or device.precision != "bf16"):
        raise InputError(
            f"--fp8-format: {device.name} in {device.precision} has no peak of FP8 products; choose another --gpu, or "
            "give device.fp8 in the file of --cluster (docs/scaling.md)"
        )
