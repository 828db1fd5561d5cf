"""Shrink a run to one that fits a small machine, and keep what its layout depends on."""

from __future__ import annotations

import dataclasses
import math
import re
from fnmatch import fnmatchcase
from typing import Any

from megatron.errors import InputError
from megatron.flags import Config, flag_name
from megatron.model.config import ModelConfig, check_expert_parallel
from megatron.model.moe_config import COMPUTATION, MoEConfig
from megatron.ops.config import OpsConfig
from megatron.optim.config import OptimizerConfig
from megatron.parallel.config import ParallelConfig
from megatron.parallel.mesh import axis_sizes
from megatron.recipes.config import FreezeConfig
from megatron.training.config import PLUGIN_CONFIGS, RunConfig
from megatron.verify.layouts import (
    Layout,
    context_communication,
    fitted_layout,
    one_stage,
    optimizer_instances,
)
from megatron.verify.shrink_experts import shrunk_experts, shrunk_windows

SEQ_LENGTH, HEAD_WIDTH, MICRO_BATCH, BUCKET = 32, 8, 2, 5000
LATENT_WIDTHS = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_head_dim": HEAD_WIDTH,
    "qk_pos_emb_head_dim": HEAD_WIDTH // 2,
    "v_head_dim": 6,
}
# Smallest vocabulary, and the fp16 loss scale, which must not overflow within a few steps.
MIN_VOCAB, LOSS_SCALE = 128, 4096.0
# Least epsilon of Adam. With a smaller one Adam moves an element whose gradient is rounding error by the whole learning
# rate, in a direction that no two runs agree on.
ADAM_EPS = 1e-3
# Largest --clip-grad, so that clipping acts on small models too.
CLIP_GRAD = 0.5
# Fields of the data files, in whose place runs read synthetic data.
DATA_FIELDS = ("data_path", "train_data_path", "valid_data_path", "test_data_path", "split")
# Sections of plug-ins that change what a step computes; those of the others get their defaults.
KEPT_PLUGINS = ("loss", "freezing", "loss scale", "spikes")


@dataclasses.dataclass(frozen=True)
class Shrunk:
    """A small run that stands for a large one.

    Attributes:
        config: of one process.
        parallel: flags of the layout, which layouts take over as far as they fit.
        layout: the run's own layout, as far as the processes allow it.
        changes: what was changed, a sentence each.
    """

    config: RunConfig
    parallel: ParallelConfig
    layout: Layout
    changes: tuple[str, ...]


def shrink(config: RunConfig, processes: int, most: int, steps: int, *, task: str = "GPT") -> Shrunk:
    """Shrink a run of `task` that was configured for a number of `processes` to one of at most `most`.

    Raises:
        InputError: the flags do not fit the number of processes, or leave no parameter of the small model to train.
    """
    old = config.parallel
    tp, pp, cp = old.tensor_model_parallel_size, old.pipeline_model_parallel_size, old.context_parallel_size
    if processes % (tp * pp * cp):
        raise InputError(
            f"--processes: {processes} is not a multiple of {tp * pp * cp}, the tensor-parallel size {tp} times the "
            f"pipeline-parallel size {pp}{f' times the context-parallel size {cp}' if cp > 1 else ''}"
        )
    instances = old.num_distributed_optimizer_instances
    layout = fitted_layout(Layout.from_config(old, processes), most, replicas=2 if instances == 1 else 4)
    parallel, num_layers = _shrunk_layers(config, layout)
    heads = parallel.context_grid[0]
    model = _shrunk_model(config.model, tp, layout, num_layers, _seq_length(config, layout), heads)
    parallel = dataclasses.replace(
        parallel,
        ddp_bucket_size=min(BUCKET, old.ddp_bucket_size),
        distributed_backend=None,
        distributed_timeout_minutes=2,
    )
    training = config.training
    if model.num_experts is not None:
        # The rounding of 16-bit values changes the choice of experts, for which there is no bound.
        training = dataclasses.replace(training, bf16=False, fp16=False)
    no_files: dict[str, Any] = dict.fromkeys(DATA_FIELDS)
    small = dataclasses.replace(
        config,
        model=model,
        data=dataclasses.replace(
            config.data,
            seq_length=_seq_length(config, layout),
            mock_data=True,
            packing="concatenated",
            **no_files,
            num_workers=0,
        ),
        tokenizer=_small_tokenizer(config, layout.tp),
        ops=_cpu_ops(config.ops),
        training=dataclasses.replace(
            training,
            micro_batch_size=min(training.micro_batch_size, MICRO_BATCH),
            train_iters=steps,
            train_samples=None,
            eval_interval=steps,
            eval_iters=1,
            skip_train=False,
            device="cpu",
        ),
        optimizer=_small_optimizer(config.optimizer),
        parallel=parallel,
        checkpoint=type(config.checkpoint)(),
        logging=type(config.logging)(log_interval=1),
        plugins=_plugins(config, task, model),
    )
    return Shrunk(small, parallel, layout, tuple(_changes(config, small, processes, layout)))


def _shrunk_layers(config: RunConfig, layout: Layout) -> tuple[ParallelConfig, int]:
    """Flags of the pipeline for few layers, and their number."""
    parallel, stages = config.parallel, layout.pp
    per_stage = min(2, max(1, config.model.num_layers // parallel.pipeline_model_parallel_size))
    changes: dict[str, Any] = {
        **layout.flags(),
        **context_communication(parallel, layout),
        **optimizer_instances(parallel, layout),
        "recompute_num_layers": parallel.recompute_num_layers
        and min(parallel.recompute_num_layers, per_stage),
    }
    if layout.tp == 1:
        changes |= {"sequence_parallel": False, "distribute_saved_activations": False}
    ends = (parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers)
    counted = (parallel.account_for_embedding_in_pipeline_split, parallel.account_for_loss_in_pipeline_split)
    if stages == 1:
        changes |= one_stage()
        layers = min(config.model.num_layers, 4)
    elif parallel.pipeline_model_parallel_layout is not None:
        # A part has at most two layers, and a stage two parts. The last part of the model stays.
        parts = [re.sub("t{3,}", "tt", part) for part in parallel.layout_parts]
        chunks = 1 if len(parts) == parallel.pipeline_model_parallel_size else 2
        parts = [*parts[: chunks * stages - 1], parts[-1]]
        if not any("t" in part for part in parts):
            parts[0] += "t"
        changes["pipeline_model_parallel_layout"] = "|".join(parts)
        layers = "".join(parts).count("t")
    elif parallel.num_layers_per_virtual_pipeline_stage is not None:
        changes["num_layers_per_virtual_pipeline_stage"] = 1
        layers = 2 * stages - sum(counted)
    elif ends != (None, None):
        first, last = (None if end is None else min(end, 2) for end in ends)
        changes |= {"decoder_first_pipeline_num_layers": first, "decoder_last_pipeline_num_layers": last}
        given = [end for end in (first, last) if end is not None]
        layers = sum(given) + per_stage * (stages - len(given))
    else:
        layers = (2 if any(counted) else per_stage) * stages - sum(counted)
    return dataclasses.replace(parallel, **changes), layers


def _shrunk_model(
    model: ModelConfig, old_tp: int, layout: Layout, num_layers: int, length: int, exchanged: int
) -> ModelConfig:
    """Fewer and narrower heads, with the same sharing of groups by heads and ranks, and fewer experts.

    Args:
        exchanged: context-parallel ranks that the heads of a tensor-parallel rank are divided among.
    """
    heads, groups, tp = model.num_attention_heads, model.num_query_groups, layout.tp
    if groups >= old_tp:
        groups_left = tp * min(max(2, exchanged), groups // old_tp)
        shared = min(heads // groups, 2)
    else:
        groups_left = max(1, math.gcd(tp, groups * tp // old_tp))
        shared = tp // groups_left * min(2, heads // old_tp)
    heads_left, width = groups_left * shared, min(model.kv_channels, HEAD_WIDTH)
    if model.position_embedding_type == "rope" and int(width * model.rotary_percent) < 2:
        width = math.ceil(2 / model.rotary_percent)
    latents = _shrunk_latents(model)
    if latents:
        width = latents["qk_head_dim"] + latents["qk_pos_emb_head_dim"]
    unit = math.lcm(8, tp)
    ratio = model.hidden_size / (heads * model.kv_channels)
    hidden = max(unit, round(heads_left * width * ratio / unit) * unit)
    mlp = max(unit, round(hidden * min(model.ffn_hidden_size / model.hidden_size, 4) / unit) * unit)
    return dataclasses.replace(
        model,
        num_layers=num_layers,
        hidden_size=hidden,
        num_attention_heads=heads_left,
        num_query_groups=groups_left,
        kv_channels=width,
        ffn_hidden_size=mlp,
        max_position_embeddings=length,
        **shrunk_experts(model, num_layers, owners=layout.ep, parts=math.lcm(tp, layout.etp or 1)),
        **shrunk_windows(model, num_layers, length),
        **latents,
    )


def _shrunk_latents(model: ModelConfig) -> dict[str, Any]:
    """Widths of latent attention, if the model has it; different ones remain different."""
    if not model.multi_latent_attention:
        return {}
    return {
        name: min(width, most)
        for name, most in LATENT_WIDTHS.items()
        if (width := getattr(model, name)) is not None
    }


def _seq_length(config: RunConfig, layout: Layout) -> int:
    unit = math.lcm(8, layout.tp * layout.cp * (1 + (layout.cp > 1)))
    return max(unit, min(config.data.seq_length, SEQ_LENGTH) // unit * unit)


def _small_tokenizer(config: RunConfig, tp: int) -> Any:
    """A tokenizer of so few ids that the last rank's rows of the vocabulary include padding."""
    tokenizer = config.tokenizer
    unit = min(tokenizer.make_vocab_size_divisible_by, MIN_VOCAB)
    padded = math.ceil(MIN_VOCAB / (unit * tp)) * unit * tp
    size = padded - max(1, unit // 4)
    return type(tokenizer)(
        tokenizer_type="NullTokenizer", vocab_size=size - 1, make_vocab_size_divisible_by=unit
    )


def _small_optimizer(optimizer: OptimizerConfig) -> OptimizerConfig:
    """The same optimizer without warm-up, so that the first steps change the weights, and with a smooth step."""
    of_adam: dict[str, Any] = {"adam_eps": max(optimizer.adam_eps, ADAM_EPS)}
    return dataclasses.replace(
        optimizer,
        **of_adam,
        clip_grad=min(optimizer.clip_grad, CLIP_GRAD),
        lr_warmup_iters=0,
        lr_warmup_samples=0,
        lr_warmup_fraction=None,
        lr_decay_style="constant",
        lr_decay_iters=None,
        lr_decay_samples=None,
        lr_wsd_decay_iters=None,
        lr_wsd_decay_samples=None,
    )


def _cpu_ops(ops: OpsConfig) -> OpsConfig:
    """Replace --ops-backend apex, which needs a GPU, by auto."""
    return dataclasses.replace(ops, ops_backend="auto") if ops.ops_backend == "apex" else ops


def _frozen(freezing: FreezeConfig, task: str, model: ModelConfig) -> FreezeConfig:
    """The patterns that match a parameter of the small model, which has other layers than the large one."""
    if freezing.freeze is None:
        return freezing
    names = _parameter_names(task, model)
    kept = tuple(pattern for pattern in freezing.freeze if any(fnmatchcase(name, pattern) for name in names))
    if all(any(fnmatchcase(name, pattern) for pattern in kept) for name in names):
        raise InputError(
            f"--freeze: {' '.join(freezing.freeze)} leaves no parameter to train in the small model of "
            f"{model.num_layers} layers; verify the run without it"
        )
    return FreezeConfig(freeze=kept or None)


def _parameter_names(task: str, model: ModelConfig) -> list[str]:
    """Names of the parameters that a run trains."""
    import torch

    from megatron.interop.external import meta_model
    from megatron.model.context import ModelContext
    from megatron.variants.multi_token_prediction import MTPModel

    if not model.mtp_num_layers:
        whole = meta_model(task, model, MIN_VOCAB)
    else:
        with torch.device("meta"):
            whole = MTPModel(model, ModelContext(vocab_size=MIN_VOCAB, padded_vocab_size=MIN_VOCAB))
    return [name for name, _ in whole.named_parameters()]


def _plugins(config: RunConfig, task: str, model: ModelConfig) -> dict[str, Any]:
    plugins: dict[str, Any] = {
        title: config.plugins[title] if title in KEPT_PLUGINS else kind()
        for title, kind in PLUGIN_CONFIGS.items()
    }
    plugins["freezing"] = _frozen(plugins["freezing"], task, model)
    scale = plugins["loss scale"]
    if config.training.fp16 and scale.loss_scale is None:
        plugins["loss scale"] = dataclasses.replace(
            scale, initial_loss_scale=max(scale.min_loss_scale, min(scale.initial_loss_scale, LOSS_SCALE))
        )
    return plugins


def _changes(config: RunConfig, small: RunConfig, processes: int, layout: Layout) -> list[str]:
    """Flags that changed, with both values."""
    changes = (
        [f"processes: {processes} to {layout.processes} ({layout})"] if processes != layout.processes else []
    )
    for old, new in zip(config.sections, small.sections, strict=True):
        for field in dataclasses.fields(old):
            a, b = getattr(old, field.name), getattr(new, field.name)
            if "flag" in field.metadata and a != b and field.name not in (*DATA_FIELDS, "packing"):
                changes.append(f"{flag_name(field)}: {_shown(a)} to {_shown(b)}")
    return changes


def _shown(value: Any) -> str:
    return "none" if value is None else " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def in_layout(shrunk: Shrunk, layout: Layout) -> RunConfig:
    """The shrunk run in a layout, with the flags of its own layout as far as they fit.

    Raises:
        InputError: the model does not fit the layout.
    """
    changes = layout.flags()
    if layout.tp == 1:
        changes |= {"sequence_parallel": False, "distribute_saved_activations": False}
    if layout.pp == 1:
        changes |= one_stage()
    elif layout.pp != shrunk.layout.pp:
        changes |= one_stage() | {"pipeline_model_parallel_size": layout.pp}
    changes |= context_communication(shrunk.parallel, layout) | optimizer_instances(shrunk.parallel, layout)
    config = dataclasses.replace(shrunk.config, parallel=dataclasses.replace(shrunk.parallel, **changes))
    model, data, tp, pp, cp = config.model, config.data, layout.tp, layout.pp, layout.cp
    if cp > 1 and data.seq_length % (2 * cp * tp):
        raise InputError(
            f"layout {layout}: {data.seq_length} positions do not divide into {2 * cp * tp} parts"
        )
    if not model.can_split(tp) or (config.parallel.sequence_parallel and data.seq_length % tp):
        raise InputError(f"layout {layout}: the shrunk model cannot be split over {tp} tensor-parallel ranks")
    if config.parallel.layer_split == "even" and model.num_layers % pp:
        raise InputError(
            f"layout {layout}: {model.num_layers} layers do not divide into {pp} pipeline stages"
        )
    try:
        axis_sizes(config.parallel, layout.processes)
        check_expert_parallel(model, config.parallel, data.seq_length)
    except InputError as error:
        raise InputError(f"layout {layout}: {error}") from None
    return config


def one_process(shrunk: Shrunk) -> RunConfig:
    """The shrunk run in one process: no recomputation, no distributed optimizer, no overlap, one expert at a time."""
    plain: dict[str, Any] = {
        field.name: field.default for field in dataclasses.fields(MoEConfig) if field.name in COMPUTATION
    }
    return dataclasses.replace(
        shrunk.config,
        model=dataclasses.replace(shrunk.config.model, **plain),
        # The rounding of --grad-reduce-in-bf16 is part of the spread of one process.
        parallel=ParallelConfig(grad_reduce_in_bf16=shrunk.parallel.grad_reduce_in_bf16),
    )


def command_words(config: RunConfig) -> list[str]:
    """Flags that give a configuration, those with default values left out."""
    return [word for section in config.sections for word in _section_words(section)]


def _section_words(section: Config) -> list[str]:
    words: list[str] = []
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if "flag" not in field.metadata or value == field.default or value is None:
            continue
        words.append(flag_name(field))
        if isinstance(value, tuple):
            words += map(str, value)
        elif not isinstance(value, bool):
            words.append(str(value))
    return words
