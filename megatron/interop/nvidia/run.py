"""The model and the state of the run, from the flags that Megatron-LM saves in its checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.errors import InputError
from megatron.flags import LARGEST, field_types, flag_name
from megatron.interop.external import list_names, weights_only_state
from megatron.interop.nvidia.experts import FLAGS, expert_flags
from megatron.interop.unpickle import Record, shown_value
from megatron.model.config import ModelConfig
from megatron.model.latent_attention import LatentAttentionConfig
from megatron.model.moe_config import MoEConfig
from megatron.optim.schedule import Schedule
from megatron.tokenizer import build_tokenizer, padded_vocab_size
from megatron.tokenizer.config import TokenizerConfig

# Flags that select another architecture, often with the same tensors: MLP, attention, positions, normalization, layers.
# Each with the values, besides false ones, that change nothing.
VARIANTS: dict[str, tuple[Any, ...]] = dict.fromkeys(
    """
    squared_relu quick_geglu glu_linear_offset activation_func_clamp_value
    moe_apply_probs_on_input moe_latent_size moe_router_force_load_balancing moe_router_topk_limited_devices
    qk_l2_norm attention_output_gate head_wise_attn_gate
    multi_latent_attention experimental_attention_variant linear_attention_freq
    rotary_base_per_layer
    apply_layernorm_1p layernorm_zero_centered_gamma
    enable_mhc_connections use_mup mtp_num_layers spec hybrid_layer_pattern hybrid_override_pattern
    heterogeneous_layers_config_path heterogeneous_layers_config_encoded_json
    """.split(),
    (),
)
VARIANTS["rotary_seq_len_interpolation_factor"] = (1,)
LAYER_FLAGS = ("window_size", "window_attn_skip_freq", "no_rope_freq")

# Fields of the model that its flags may set: without those of latent attention. `expert_flags` and `layer_flags` read
# those whose values have other types.
FIELDS = {
    field.name: field
    for field in dataclasses.fields(ModelConfig)
    if field.name in FLAGS
    or (
        field not in (*dataclasses.fields(MoEConfig), *dataclasses.fields(LatentAttentionConfig))
        and not field.name.startswith("mtp_")
        and field.name not in LAYER_FLAGS
    )
}
# The flags that are read, with their types.
KINDS = {
    name: (int, float) if kind is float else (kind,)
    for name, kind in field_types(ModelConfig).items()
    if name in FIELDS
}
SIZES = (
    "model_parallel_size",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "make_vocab_size_divisible_by",
    "orig_vocab_size",
    "seq_length",
    "global_batch_size",
)
COUNTS = ("seed", "train_iters", "train_samples", "consumed_train_samples")
WSD_COUNTS = ("lr_wsd_decay_iters", "lr_wsd_decay_samples")
KINDS |= dict.fromkeys((*SIZES, *COUNTS, *WSD_COUNTS), (int,))
KINDS |= dict.fromkeys(("hybrid_layer_pattern", "hybrid_override_pattern"), (str,))
KINDS |= dict.fromkeys(("data_path", "split", "dataloader_type", "lr_wsd_decay_style"), (str,))
KINDS |= dict.fromkeys(
    ("layernorm_epsilon", "mask_prob", "short_seq_prob", "weight_decay", "lr_warmup_init"), (int, float)
)


def read_flags(path: Path, content: Any) -> Record:
    """The flags of the run in a file's content, without those that are None; empty if there are none.

    Raises:
        InputError: a flag has an impossible value.
    """
    args = content.get("args") if isinstance(content, dict) else None
    if not isinstance(args, Record) or not isinstance(args.state, dict):
        return Record("no flags", state={})
    flags = {name: value for name, value in args.state.items() if value is not None}
    for name in KINDS.keys() & flags.keys():
        value = flags[name]
        for part in value if name == "data_path" and isinstance(value, (list, tuple)) else [value]:
            check_value(path, f"its flag {name}", part, KINDS[name], low=int(name in SIZES))
    return Record(args.kind, state=flags)


def check_value(path: Path, what: str, value: Any, kinds: tuple[type, ...], low: int = 0) -> None:
    """Raise `InputError` unless a value has one of these types and, if it is a number, is in range."""
    if type(value) not in kinds or (isinstance(value, (int, float)) and not low <= value <= LARGEST):
        raise InputError(f"{path}: {what} is {shown_value(value)}, which is impossible")


def read_config(
    path: Path, args: Record, sizes: dict[str, Any], given: Mapping[str, Any], not_read: Collection[str] = ()
) -> ModelConfig:
    """The architecture of a checkpoint's model.

    Args:
        path: the file that holds `args`, for messages.
        args: the flags of the run; empty if the checkpoint has none, as NVIDIA's released models.
        sizes: fields of the config that follow from the tensors.
        given: fields that the user gives. The number of heads is required here if the flags lack it.
        not_read: flags that must not be set, besides `VARIANTS`.

    Raises:
        InputError: the number of heads is unknown, sizes contradict each other, or the architecture is not supported.
    """
    for name in (*VARIANTS, *not_read):
        value = args.get(name)
        if value and value not in VARIANTS.get(name, ()):
            flag = f"--{name.replace('_', '-')}"
            raise InputError(f"{path}: was trained with {flag}, which is not supported in this format")
    said = {name: args.get(name) for name in FIELDS if name not in FLAGS}
    said |= expert_flags(path, args) | layer_flags(path, args)
    if args.get("layernorm_epsilon") is not None:  # older name of norm_epsilon
        said["norm_epsilon"] = args.get("layernorm_epsilon")
    said = {name: value for name, value in said.items() if value is not None}
    if not said.get("group_query_attention"):
        said.pop("num_query_groups", None)  # 1 and unused in newer versions
    flags = {name: flag_name(field) for name, field in FIELDS.items()}
    for name, value in given.items():
        if said.get(name, value) != value:
            raise InputError(
                f"{flags[name]}: {value} contradicts {path}, which has {said[name]}; leave the flag out"
            )
    said |= given
    if "num_experts" in sizes and "moe_router_topk" not in said:
        raise InputError(f"--moe-router-topk is required: {path} lacks it")
    for name, size in sizes.items():
        if said.get(name, size) != size:
            raise InputError(f"{path}: {name} is {said[name]} in its flags, but {size} by its tensors")
    if "num_attention_heads" not in said:
        raise InputError(f"--num-attention-heads is required: {path} lacks it")
    try:
        # In Megatron-LM the padding of the vocabulary is part of the softmax.
        return ModelConfig(**sizes | said | {"mask_padded_vocab": False})
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def layer_flags(path: Path, args: Record) -> dict[str, str]:
    """Fields of the model's config for the layers with a window and those without RoPE, which are numbers and lists.

    Raises:
        InputError: a flag has an impossible value, or windows reach beyond the query.
    """
    fields = {}
    for name in LAYER_FLAGS:
        value = args.get(name)
        if value is None:
            continue
        values = list(value) if isinstance(value, (list, tuple)) else [value]
        if any(type(number) is not int or not -1 <= number <= LARGEST for number in values):
            raise InputError(f"{path}: its flag {name} is {shown_value(value)}, which is impossible")
        if name != "window_size":
            is_list = isinstance(value, (list, tuple))
            fields[name] = f"[{','.join(map(str, values))}]" if is_list else str(value)
        elif len(values) != 2 or values[0] < 0 or values[1] not in (-1, 0):
            raise InputError(f"{path}: was trained with --window-size {values}, and only L,0 is supported")
        else:
            fields[name] = f"{values[0]},0"
    return fields


def heads_note(path: Path, args: Record, model: ModelConfig) -> Iterator[str]:
    """A note if the file lacks the number of heads: any that divides the hidden size fits the tensors."""
    if args.get("num_attention_heads") is None:
        yield (
            f"--num-attention-heads {model.num_attention_heads} cannot be checked against {path}, nor by "
            "comparing logits; check the loss on known text"
        )


def check_tensors(
    folder: Path,
    found: dict[str, tuple[int, ...]],
    expected: dict[str, tuple[int, ...]],
    dtypes: Iterable[torch.dtype],
) -> None:
    """Raise `InputError` unless the tensors of these names, shapes and dtypes are those of the model."""
    missing = [name for name in expected if name not in found]
    unknown = [name for name in found if name not in expected]
    for names, fault in ((missing, "lacks"), (unknown, "has unknown tensors:")):
        if names:
            raise InputError(f"{folder}: {fault} {list_names(names)}")
    for name, shape in expected.items():
        if found[name] != shape:
            raise InputError(f"{folder}: {name} has shape {found[name]}, but {shape} by the flags of the run")
    kinds = {str(dtype)[6:] for dtype in dtypes}
    if not kinds <= {"float32", "float16", "bfloat16"} or len(kinds) > 1:
        raise InputError(
            f"{folder}: its weights are {' and '.join(sorted(kinds))}; all must be float32, float16 or bfloat16"
        )


def schedule_of(content: dict[str, Any]) -> dict[str, Any]:
    """The state of the learning rate schedule in a file; its name differs in v3.0."""
    schedule = content.get("lr_scheduler", content.get("opt_param_scheduler"))
    return schedule if isinstance(schedule, dict) else {}


def counts_samples(content: dict[str, Any], args: Record) -> bool:
    """True if a file holds the run's progress in samples, as v2.0 and later save it. v1 counts iterations, and does not
    save the batch size."""
    schedule = schedule_of(content)
    return bool(schedule) and "start_lr" not in schedule and args.get("global_batch_size") is not None


def read_state(
    path: Path,
    content: dict[str, Any],
    args: Record,
    *,
    task: str,
    model: ModelConfig,
    tokenizer: TokenizerConfig,
    padded: int,
    bf16: bool,
) -> dict[str, Any]:
    """The content of state.json for the checkpoint whose file is `path`.

    Args:
        content: the content of the file, for a run that `counts_samples`; empty to read only the weights.
        tokenizer: as given by the user; it gives the vocabulary size if `args` lacks it.
        padded: rows of the word embeddings.
    """
    vocab_size = _vocab_size(path, args, tokenizer, padded)
    multiple = args.get("make_vocab_size_divisible_by", tokenizer.make_vocab_size_divisible_by)
    tokenizer = dataclasses.replace(tokenizer, make_vocab_size_divisible_by=multiple)
    state = weights_only_state(task, model, tokenizer, vocab_size=vocab_size, bf16=bf16)
    state["padded_vocab_size"] = padded
    config = state["config"]
    config["data"]["seq_length"] = args.get("seq_length", model.max_position_embeddings)
    if not content:
        return state
    config["training"]["seed"] = args.get("seed")
    config["data"]["mock_data"] = False
    for name in ("data_path", "split", "dataloader_type", "mask_prob", "short_seq_prob"):
        config["data"][name] = args.get(name)
    iteration, batch = content.get("iteration"), args.get("global_batch_size")
    check_value(path, "its iteration", iteration, (int,))
    samples = args.get("train_samples") or (args.get("train_iters") or 0) * batch
    consumed = args.get("consumed_train_samples") or iteration * batch
    return state | {
        "iteration": iteration,
        "consumed_samples": consumed,
        "train_samples": samples,
        "schedule": dataclasses.asdict(_schedule(path, schedule_of(content), args, samples)),
    }


def _vocab_size(path: Path, args: Record, tokenizer: TokenizerConfig, padded: int) -> int:
    """The vocabulary size; most checkpoints hold only the padded one."""
    if tokenizer.tokenizer_type is not None:
        size, source = build_tokenizer(tokenizer).vocab_size, f"the tokenizer ({tokenizer.tokenizer_type})"
    elif tokenizer.vocab_size is not None:
        size, source = tokenizer.vocab_size, "--vocab-size"
    elif args.get("orig_vocab_size") is not None:
        size, source = args.get("orig_vocab_size"), "orig_vocab_size in it"
    else:
        raise InputError(
            f"{path}: lacks the vocabulary size; its word embeddings have {padded} rows with padding; give "
            "the tokenizer (--tokenizer-type and its files) or --vocab-size"
        )
    multiple, parts = (
        args.get("make_vocab_size_divisible_by"),
        args.get("model_parallel_size", 1),
    )  # older name
    parts = args.get("tensor_model_parallel_size", parts)
    fits = type(size) is int and 0 < size <= padded
    if fits and multiple:
        fits = padded_vocab_size(size, multiple, parts) == padded
    if not fits:
        raise InputError(
            f"{path}: its word embeddings have {padded} rows, but {size} ids, given by {source}, are padded to another "
            "number; give the tokenizer of the training run"
        )
    return size


def _schedule(path: Path, saved: dict[str, Any], args: Record, train_samples: int) -> Schedule:
    """The schedules of the run; that of the learning rate is in samples."""
    decay = args.get("weight_decay", 0.01)
    lr = ("max_lr", "min_lr", "warmup_steps", "decay_steps", "decay_style")
    found: dict[str, Any] = {
        name: saved.get(name, saved.get(f"lr_{name}")) for name in lr
    }  # lr_... in later versions
    later = {"start_wd": decay, "end_wd": decay, "wd_incr_style": "constant"}  # since v3.0
    found |= {name: saved.get(name, value) for name, value in later.items()}
    for name, value in found.items():
        kinds = (str,) if name in ("decay_style", "wd_incr_style") else (int, float)
        check_value(path, f"{name} of its learning rate schedule", value, kinds)
    wsd_decay = (args.get("lr_wsd_decay_iters") or 0) * args.get("global_batch_size")
    return Schedule(
        max_lr=found["max_lr"],
        min_lr=found["min_lr"],
        init_lr=args.get("lr_warmup_init", 0.0),
        warmup=found["warmup_steps"],
        decay=found["decay_steps"],
        decay_style=found["decay_style"],
        wsd_decay=args.get("lr_wsd_decay_samples") or wsd_decay,
        wsd_decay_style=args.get("lr_wsd_decay_style", "exponential"),
        start_weight_decay=found["start_wd"],
        end_weight_decay=found["end_wd"],
        weight_decay_style=found["wd_incr_style"],
        train_samples=train_samples,
    )
