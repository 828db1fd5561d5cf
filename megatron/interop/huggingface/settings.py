"""Conversion between config.json of a Hugging Face model and `ModelConfig`."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from megatron.checkpoint.checkpoint import differences
from megatron.errors import InputError
from megatron.flags import either
from megatron.interop.experts import layer_freq
from megatron.interop.huggingface.families import FAMILIES
from megatron.interop.huggingface.family import Family
from megatron.interop.huggingface.moe_families import checked_layers
from megatron.model.config import ModelConfig
from megatron.tokenizer.base import read_json
from megatron.variants.rope_scaling import TURNS, Scaling, check_turns

# Reasons why other model types are not supported.
NOT_SUPPORTED = {
    "gemma3": "an image encoder; the text model alone, gemma3_text, is",
}
MAX_LABELS = 100_000
TANH_GELU = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")
# Keys of the scaling of RoPE for the turns in `TURNS`.
TURN_KEYS = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_slow", "beta_fast")}
# The supported values of keys of any family.
FIXED: dict[str, tuple[Any, ...]] = {
    # Other values could name code on the hub.
    "_attn_implementation": (None, "eager", "sdpa", "flash_attention_2"),
    "attn_implementation": (None, "eager", "sdpa", "flash_attention_2"),
    "experts_implementation": (None, "eager"),
    "quantization_config": (None,),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
}
# Keys that do not change what the model computes.
IGNORED = {
    "_attn_implementation_autoset",
    "_commit_hash",
    "_name_or_path",
    "architectures",
    "attention_softmax_in_fp32",
    "bias_dropout_fusion",
    "bos_token_id",
    "chunk_size_feed_forward",
    "classifier_dropout",
    "dtype",
    "eos_token_id",
    "gradient_checkpointing",
    "is_encoder_decoder",
    "masked_softmax_fusion",
    "model_type",
    "n_ctx",
    "offset_alibi",
    "output_past",
    "pad_token_id",
    "pretraining_tp",
    "reorder_and_upcast_attn",
    "skip_bias_add",
    "skip_bias_add_qkv",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
    "task_specific_params",
    "torch_dtype",
    "transformers_version",
    "unk_token_id",
    "use_cache",
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """The content of a config.json; `rows` of the word embeddings may exceed the vocabulary size."""

    family: Family
    model: ModelConfig
    rows: int
    notes: tuple[str, ...]


def read_settings(path: Path) -> Settings:
    """Read a config.json.

    Raises:
        InputError: it is damaged, or describes a model that is not supported.
    """
    config = read_json(str(path))
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise InputError(f"{path}: has no 'model_type'; it is not the config.json of a Hugging Face model")
    try:
        return _from_config(config)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{path}: is damaged ({error})") from None


def _from_config(config: dict[str, Any]) -> Settings:
    if config["model_type"] in NOT_SUPPORTED:
        kind = config["model_type"]
        raise InputError(f"model_type {kind!r} is not supported: it has {NOT_SUPPORTED[kind]}")
    if config["model_type"] not in FAMILIES:
        raise InputError(f"model_type {config['model_type']!r} is not supported; use {either(FAMILIES)}")
    family = FAMILIES[config["model_type"]]
    # Keys are removed as they are used, so that those left at the end are unknown.
    left = {key: value for key, value in config.items() if key not in IGNORED | family.unused}
    for key, newer in family.older.items():
        if key in left:
            left[newer] = left.pop(key)
    for key, values in (FIXED | dict(family.fixed)).items():
        _check(key, left.pop(key, values[0]), values)
    for key, other in family.equal.items():
        _check(key, left.pop(key, None), (left.get(other), None))
    rows = left.pop("vocab_size", None)
    if type(rows) is not int or rows < 1:
        raise InputError(f"vocab_size: {rows!r} is not a positive integer")
    fields = dict(family.shape)
    notes: list[str] = []
    rope = _rope_dict(left, family, fields)
    if "partial_rotary_factor" in rope:
        left["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    for key, field in family.settings.items():
        if key not in left and key not in family.defaults:
            raise InputError(f"lacks {key!r}")
        default = family.defaults.get(key)
        fields[field] = left.pop(key, default)
        required = key not in family.defaults or default is not None
        # Transformers takes null for as many key and value heads as query heads, whatever their default.
        if fields[field] is None and required and key != "num_key_value_heads":
            raise InputError(f"{key}: null is not a number")
    if family.read_keys is not None:
        family.read_keys(left, fields)
    groups, heads = fields.get("num_query_groups"), fields["num_attention_heads"]
    fields["group_query_attention"] = groups not in (None, heads)
    tied = left.pop("tie_word_embeddings", family.tied)
    if type(tied) is not bool:
        raise InputError(f"tie_word_embeddings: {tied!r} is not true or false")
    fields["untie_embeddings_and_output_weights"] = not tied
    if family.activation is not None:
        key, default = family.activation
        name = left.pop(key, default)
        _check(key, name, ("gelu", *TANH_GELU))
        # The first flag affects the layers, the second also BERT's head.
        fields |= {"bias_gelu_fusion": name != "gelu", "openai_gelu": name != "gelu"}
    if fields.get("position_embedding_type") == "rope":
        fields |= _read_rope(rope, left, family, fields["max_position_embeddings"], notes)
        fields |= _read_windows(left, family, fields)
        if fields.get("window_size") is None:
            fields.pop("rotary_base_local", None)
    _check_unused(left)
    if left.pop("embd_pdrop", resid := fields["hidden_dropout"]) != resid:
        notes.append(
            f"config.json: embd_pdrop differs from resid_pdrop; --hidden-dropout {resid} replaces both"
        )
    notes += [f"config.json: {key!r} is unknown and has no effect" for key in left]
    model = ModelConfig(**fields)
    if int(model.kv_channels * model.rotary_percent) % 2:
        raise InputError(f"partial_rotary_factor: {model.rotary_percent} gives an odd number of channels")
    return Settings(family, model, rows, tuple(notes))


def _rope_dict(left: dict[str, Any], family: Family, fields: dict[str, Any]) -> dict[str, Any]:
    """Remove the dict of RoPE's settings, and take over the base of the layers with a window if they have their own."""
    scaling, parameters = left.pop("rope_scaling", None) or {}, left.pop("rope_parameters", None)
    parameters = dict(family.rope_parameters if parameters is None else parameters)
    if family.local_rope_theta is not None:
        local = parameters.get("sliding_attention") or {}
        _check("rope_type of sliding_attention", local.get("rope_type", "default"), ("default",))
        base = left.pop("rope_local_base_freq", family.local_rope_theta)
        fields["rotary_base_local"] = local.get("rope_theta", base)
        nested = "full_attention" in parameters or "sliding_attention" in parameters
        parameters = (parameters.get("full_attention") or {}) if nested else parameters
        return {**parameters, **scaling}
    return dict(scaling or parameters)  # as transformers does


def _read_rope(
    rope: dict[str, Any], left: dict[str, Any], family: Family, length: int, notes: list[str]
) -> dict[str, Any]:
    """Convert the settings of RoPE, and remove their keys.

    transformers 5 keeps all in one dict, `rope`; older versions keep some in `left`.

    Args:
        length: longest sequence.
    """
    base = rope.pop("rope_theta", left.pop("rope_theta", family.rope_theta))
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    _check("rope_type", kind, family.rope_types)
    if "partial_rotary_factor" not in family.settings:
        _check("partial_rotary_factor", left.pop("partial_rotary_factor", 1.0), (1.0,))
    if base is None:
        raise InputError("rope_theta: null is not a number")
    original = left.pop("original_max_position_embeddings", None)
    original = rope.pop("original_max_position_embeddings", None) if original is None else original
    if kind != "default" and rope.get("factor") is None:
        raise InputError(f"rope_type: {kind!r} lacks 'factor'")
    factor, fields = rope.pop("factor", None), {"rotary_base": base}
    if kind == "dynamic":
        _check("original_max_position_embeddings", original, (None, length))
        notes.append(f"config.json: rope_type 'dynamic' has no effect on sequences of up to {length} tokens")
    elif kind != "default":
        fields |= {"use_rope_scaling": True, "rope_scaling_type": kind, "rope_scaling_factor": factor}
    if kind in TURNS:
        fields["rope_scaling_original_length"] = length if original is None else original
        keys = zip(TURN_KEYS[kind], TURNS[kind], strict=True)
        turns = tuple(float(rope.pop(key, None) or default) for key, default in keys)
        check_turns(turns)
        fields["rope_scaling_turns"] = None if turns == TURNS[kind] else turns
    if kind == "yarn":
        given = rope.pop("attention_factor", None)
        scales = [rope.pop(key, None) for key in ("mscale", "mscale_all_dim")]
        if family.shape.get("multi_latent_attention") and scales[1]:
            # Besides the attention factor, m(mscale) / m(mscale_all_dim), they scale the scores.
            _check("attention_factor", given, (None,))
            fields |= zip(("mscale", "mscale_all_dim"), map(float, scales), strict=True)
        elif given is None and all(scales):  # as transformers does, it ignores one alone
            numerator, denominator = (1 + 0.1 * scale * math.log(factor) for scale in scales)
            given = numerator / denominator
        expected = Scaling(kind, factor, length).attention_factor
        is_default = given is None or math.isclose(given, expected, rel_tol=1e-6)
        fields["rope_scaling_attention_factor"] = None if is_default else given
        truncate = rope.pop("truncate", True)
        _check("truncate", truncate, (True, False))
        fields["yarn_correction_range_round_to_int"] = truncate
    left |= rope
    return fields


def _read_windows(left: dict[str, Any], family: Family, fields: dict[str, Any]) -> dict[str, Any]:
    """Convert the settings of attention windows, and remove their keys. In transformers a window includes the query.

    Windows that cover the longest sequence are left out, unless their layers are special in another way.
    """
    found = {key: left.pop(key, default) for key, default in family.windows.items()}
    window, layers = found.get("sliding_window"), checked_layers(fields)
    kinds = left.pop("layer_types", None)
    usual = [True] * layers if family.window_layers is None else family.window_layers(found, layers)
    if window is None or not found.get("use_sliding_window", True):
        usual = [False] * layers
    windowed = usual if kinds is None else [kind == "sliding_attention" for kind in kinds]
    for kind in kinds or ():
        _check("layer_types", kind, ("full_attention", "sliding_attention"))
    if len(windowed) != layers or (family.window_layers is None and windowed != usual):
        raise InputError(
            f"layer_types: {str(kinds)[:80]} is not supported for {family.model_type} of {layers} layers"
        )
    if not any(windowed):
        return {}
    if type(window) is not int or window < 1:
        raise InputError(f"sliding_window: {window!r} is not a positive integer; sliding attention needs one")
    if window >= fields["max_position_embeddings"] and fields.get("rotary_base_local") is None:
        return {}
    skipped = None if all(windowed) else _skip_freq(windowed)
    return {"window_size": f"{window - 1},0", "window_attn_skip_freq": skipped}


def _skip_freq(windowed: list[bool]) -> str:
    """The shortest --window-attn-skip-freq for layers of which some have no window."""
    period = windowed.index(False) + 1
    if windowed == [(layer + 1) % period != 0 for layer in range(len(windowed))]:
        return str(period)
    return layer_freq(windowed)


def _windows_to_config(family: Family, model: ModelConfig) -> dict[str, Any]:
    """The settings of attention windows under the family's keys."""
    windows = model.windows
    found = [window for window in windows if window is not None]
    values: dict[str, Any] = {
        "sliding_window": found[0] + 1 if found else None,
        "use_sliding_window": bool(found),
        "max_window_layers": windows.index(found[0]) if found else len(windows),
    }
    config = {key: values[key] for key in family.windows if key in values}
    has_pattern = family.window_layers is not None
    if has_pattern and (found or "use_sliding_window" not in family.windows):
        config["layer_types"] = ["full_attention" if w is None else "sliding_attention" for w in windows]
    return config


def _check_unused(left: dict[str, Any]) -> None:
    """Raise `InputError` if transformers would act on a key that has no meaning here."""
    private = [key for key in left if key.startswith("_")]
    if private:  # transformers sets attributes of any such name
        raise InputError(f"{private[0]} is not supported; remove it")
    labels = left.pop("num_labels", 2)
    if type(labels) is not int or not 0 <= labels <= MAX_LABELS:  # transformers names each of them
        raise InputError(f"num_labels: {labels!r} is not a number of labels up to {MAX_LABELS:,}; remove it")


def _check(key: str, value: Any, values: tuple[Any, ...]) -> None:
    if value not in values:
        raise InputError(f"{key}: {value!r} is not supported; only {either(map(repr, values))} is")


def to_config(family: Family, model: ModelConfig, rows: int) -> dict[str, Any]:
    """The content of config.json for a model, without special tokens.

    Raises:
        InputError: the family cannot express the model.
    """
    config: dict[str, Any] = {"model_type": family.model_type, "vocab_size": rows}
    config |= {key: getattr(model, field) for key, field in family.settings.items()}
    config |= {key: values[0] for key, values in family.fixed.items()}
    config["tie_word_embeddings"] = not model.untie_embeddings_and_output_weights
    is_bert = family.model_type == "megatron-bert"
    if family.activation is not None:
        tanh = model.openai_gelu if is_bert else model.tanh_gelu
        config[family.activation[0]] = "gelu_new" if tanh else "gelu"
    if family.shape.get("position_embedding_type") == "rope":
        config |= _rope_to_config(family, model)
        config |= _windows_to_config(family, model)
    if family.write_keys is not None:
        config |= family.write_keys(model)
    if family.model_type == "gpt2":
        # llama.cpp reads n_ctx.
        config |= {"embd_pdrop": model.hidden_dropout, "n_ctx": config["n_positions"]}
    config |= {older: config[key] for older, key in family.older.items()}
    lost = differences(model, _from_config(config).model, is_bert=is_bert)
    if lost:
        lines = "; ".join(f"{flag} is {ours} here and {theirs} there" for flag, ours, theirs in lost)
        raise InputError(f"the model cannot be expressed as Hugging Face's {family.model_type}: {lines}")
    return config


def _rope_to_config(family: Family, model: ModelConfig) -> dict[str, Any]:
    """The settings of RoPE under the keys of transformers 5 and under those of older versions."""
    scaling: dict[str, Any] = {}
    if model.use_rope_scaling:
        kind, factor = model.rope_scaling_type, model.rope_scaling_factor
        scaling = {"rope_type": kind, "factor": factor}
        if kind in TURNS:
            length = model.rope_scaling_original_length
            scaling["original_max_position_embeddings"] = length
            scaling |= zip(TURN_KEYS[kind], model.rope_scaling_turns or TURNS[kind], strict=True)
        if kind == "yarn" and model.mscale_all_dim:
            scaling |= {"mscale": model.mscale, "mscale_all_dim": model.mscale_all_dim}
        elif kind == "yarn":
            scaling["attention_factor"] = Scaling.from_config(model).attention_factor
        if kind == "yarn" and not model.yarn_correction_range_round_to_int:
            scaling["truncate"] = False
    parameters = {"rope_type": "default", "rope_theta": model.rotary_base, **scaling}
    if model.rotary_percent != 1:
        parameters["partial_rotary_factor"] = model.rotary_percent
    config = {"rope_theta": model.rotary_base, "rope_scaling": scaling or None, "rope_parameters": parameters}
    if family.local_rope_theta is not None:
        local = model.rotary_base_local or family.local_rope_theta
        config["rope_local_base_freq"] = local
        config["rope_parameters"] = {
            "full_attention": parameters,
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        }
    return config
