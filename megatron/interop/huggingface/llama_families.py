"""Tables of the model families of transformers that are built like Llama."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron.errors import InputError
from megatron.interop.huggingface.family import LAYER, Family, fused_qkv, gate_and_up, same, separate_qkv
from megatron.model.config import ModelConfig

MISTRAL = Family(
    model_type="mistral",
    architectures=("MistralForCausalLM",),
    prefix="model.",
    modules={
        "embedding.word_embeddings": same("model.embed_tokens"),
        LAYER + "input_layernorm": same("model.layers.{}.input_layernorm"),
        LAYER + "self_attention.linear_qkv": separate_qkv(
            "model.layers.{}.self_attn.q_proj",
            "model.layers.{}.self_attn.k_proj",
            "model.layers.{}.self_attn.v_proj",
        ),
        LAYER + "self_attention.linear_proj": same("model.layers.{}.self_attn.o_proj"),
        LAYER + "pre_mlp_layernorm": same("model.layers.{}.post_attention_layernorm"),
        LAYER + "mlp.linear_fc1": gate_and_up("model.layers.{}.mlp.gate_proj", "model.layers.{}.mlp.up_proj"),
        LAYER + "mlp.linear_fc2": same("model.layers.{}.mlp.down_proj"),
        "decoder.final_layernorm": same("model.norm"),
        "output_layer": same("lm_head"),
    },
    ignored=r"(.*\.)?rotary_emb\.inv_freq",
    settings={
        "num_hidden_layers": "num_layers",
        "hidden_size": "hidden_size",
        "num_attention_heads": "num_attention_heads",
        "max_position_embeddings": "max_position_embeddings",
        "intermediate_size": "ffn_hidden_size",
        "num_key_value_heads": "num_query_groups",
        "head_dim": "kv_channels",
        "rms_norm_eps": "norm_epsilon",
        "attention_dropout": "attention_dropout",
        "initializer_range": "init_method_std",
    },
    defaults={
        "num_key_value_heads": 8,
        "head_dim": None,
        "rms_norm_eps": 1e-6,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
    },
    shape={
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "swiglu": True,
        "hidden_dropout": 0.0,
        "add_bias_linear": False,
    },
    fixed={"hidden_act": ("silu", "swish")},
    windows={"sliding_window": 4096},
    activation=None,
    tied=False,
)

LLAMA = dataclasses.replace(
    MISTRAL,
    model_type="llama",
    architectures=("LlamaForCausalLM",),
    settings={**MISTRAL.settings, "attention_bias": "add_attention_bias", "mlp_bias": "add_mlp_bias"},
    defaults={**MISTRAL.defaults, "num_key_value_heads": None, "attention_bias": False, "mlp_bias": False},
    windows={},
)

_QWEN_WINDOWS = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}


def _qwen_layers(found: dict[str, Any], layers: int) -> list[bool]:
    return [layer >= found["max_window_layers"] for layer in range(layers)]


QWEN2 = dataclasses.replace(
    MISTRAL,
    model_type="qwen2",
    architectures=("Qwen2ForCausalLM",),
    defaults={**MISTRAL.defaults, "num_key_value_heads": 32},
    shape={**MISTRAL.shape, "add_qkv_bias": True},
    windows=_QWEN_WINDOWS,
    window_layers=_qwen_layers,
)

_QK_NORMS = {
    LAYER + "self_attention.q_layernorm": same("model.layers.{}.self_attn.q_norm"),
    LAYER + "self_attention.k_layernorm": same("model.layers.{}.self_attn.k_norm"),
}

QWEN3 = dataclasses.replace(
    MISTRAL,
    model_type="qwen3",
    architectures=("Qwen3ForCausalLM",),
    modules={**MISTRAL.modules, **_QK_NORMS},
    settings={**MISTRAL.settings, "attention_bias": "add_attention_bias"},
    defaults={**MISTRAL.defaults, "num_key_value_heads": 32, "head_dim": 128, "attention_bias": False},
    shape={**MISTRAL.shape, "qk_layernorm": True},
    windows=_QWEN_WINDOWS,
    window_layers=_qwen_layers,
)

PHI3 = dataclasses.replace(
    MISTRAL,
    model_type="phi3",
    architectures=("Phi3ForCausalLM",),
    modules={
        **MISTRAL.modules,
        LAYER + "self_attention.linear_qkv": fused_qkv("model.layers.{}.self_attn.qkv_proj"),
        LAYER + "mlp.linear_fc1": same("model.layers.{}.mlp.gate_up_proj"),
    },
    settings={
        **MISTRAL.settings,
        "resid_pdrop": "hidden_dropout",
        "partial_rotary_factor": "rotary_percent",
    },
    defaults={
        **LLAMA.defaults,
        "rms_norm_eps": 1e-5,
        "resid_pdrop": 0.0,
        "partial_rotary_factor": 1.0,
    },
    windows={"sliding_window": None},
    rope_types=("default",),
)

OLMO2 = dataclasses.replace(
    MISTRAL,
    model_type="olmo2",
    architectures=("Olmo2ForCausalLM",),
    modules={
        **{name: MISTRAL.modules[name] for name in MISTRAL.modules if not name.endswith("_layernorm")},
        **_QK_NORMS,
        LAYER + "post_self_attn_layernorm": same("model.layers.{}.post_attention_layernorm"),
        LAYER + "post_mlp_layernorm": same("model.layers.{}.post_feedforward_layernorm"),
        "decoder.final_layernorm": same("model.norm"),
    },
    settings={
        **{key: field for key, field in MISTRAL.settings.items() if key != "head_dim"},
        "attention_bias": "add_attention_bias",
    },
    defaults={**LLAMA.defaults, "rms_norm_eps": 1e-5},
    shape={**MISTRAL.shape, "norm_after": True, "qk_layernorm": True, "qk_layernorm_all_heads": True},
    windows={},
)

GEMMA = dataclasses.replace(
    MISTRAL,
    model_type="gemma",
    architectures=("GemmaForCausalLM",),
    settings={**MISTRAL.settings, "attention_bias": "add_attention_bias"},
    defaults={**MISTRAL.defaults, "num_key_value_heads": 16, "head_dim": 256, "attention_bias": False},
    shape={
        **{key: value for key, value in MISTRAL.shape.items() if key != "swiglu"},
        "activation_function": "geglu",
        "openai_gelu": True,
        "apply_layernorm_1p": True,
        "scale_embeddings": True,
    },
    fixed={
        "hidden_act": ("gelu_pytorch_tanh", "gelu"),  # transformers takes the second for the first
        "hidden_activation": ("gelu_pytorch_tanh", None),
        "use_bidirectional_attention": (None, False),
    },
    windows={},
    tied=True,
)


def _read_gemma2(left: dict[str, Any], fields: dict[str, Any]) -> None:
    """Take over the factor and the soft caps of the scores and logits."""
    scalar = left.pop("query_pre_attn_scalar", 256)
    if type(scalar) not in (int, float) or not 0 < scalar < 1e9:
        raise InputError(f"query_pre_attn_scalar: {scalar!r} is not a positive number")
    fields["softmax_scale"] = None if scalar == fields["kv_channels"] else scalar**-0.5
    fields["attn_logit_softcapping"] = left.pop("attn_logit_softcapping", 50.0)
    fields["final_logit_softcapping"] = left.pop("final_logit_softcapping", 30.0)


def _write_gemma2(model: ModelConfig) -> dict[str, Any]:
    scale = model.softmax_scale
    return {
        "query_pre_attn_scalar": model.kv_channels if scale is None else round(scale**-2),
        "attn_logit_softcapping": model.attn_logit_softcapping,
        "final_logit_softcapping": model.final_logit_softcapping,
    }


def _read_gemma3(left: dict[str, Any], fields: dict[str, Any]) -> None:
    # transformers reads a soft cap of scores and does not use it.
    _read_gemma2({"attn_logit_softcapping": None, "final_logit_softcapping": None} | left, fields)
    fields["attn_logit_softcapping"] = None
    for key in ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"):
        left.pop(key, None)


def _gemma3_layers(found: dict[str, Any], layers: int) -> list[bool]:
    period = found["_sliding_window_pattern"] or found["sliding_window_pattern"]
    if type(period) is not int or period < 1:
        raise InputError(f"sliding_window_pattern: {period!r} is not a positive integer")
    return [(layer + 1) % period != 0 for layer in range(layers)]


GEMMA2 = dataclasses.replace(
    GEMMA,
    model_type="gemma2",
    architectures=("Gemma2ForCausalLM",),
    modules={
        **GEMMA.modules,
        LAYER + "post_self_attn_layernorm": same("model.layers.{}.post_attention_layernorm"),
        LAYER + "pre_mlp_layernorm": same("model.layers.{}.pre_feedforward_layernorm"),
        LAYER + "post_mlp_layernorm": same("model.layers.{}.post_feedforward_layernorm"),
    },
    defaults={**GEMMA.defaults, "num_key_value_heads": 4},
    shape={**GEMMA.shape, "sandwich_norm": True},
    fixed={key: values for key, values in GEMMA.fixed.items() if key != "hidden_act"},
    windows={"sliding_window": 4096},
    window_layers=lambda found, layers: [layer % 2 == 0 for layer in range(layers)],
    unused=frozenset({"hidden_act", "cache_implementation"}),
    read_keys=_read_gemma2,
    write_keys=_write_gemma2,
)

GEMMA3 = dataclasses.replace(
    GEMMA2,
    model_type="gemma3_text",
    architectures=("Gemma3ForCausalLM",),
    modules={**GEMMA2.modules, **_QK_NORMS},
    shape={**GEMMA2.shape, "qk_layernorm": True},
    windows={"sliding_window": 4096, "sliding_window_pattern": 6, "_sliding_window_pattern": None},
    window_layers=_gemma3_layers,
    rope_theta=1e6,
    local_rope_theta=10000.0,
    read_keys=_read_gemma3,
)
