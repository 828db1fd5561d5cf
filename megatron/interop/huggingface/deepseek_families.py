"""Tables of DeepSeek-V2 and V3 of transformers: latent attention, shared experts, and experts in groups."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from megatron.errors import InputError
from megatron.interop.experts import layer_freq
from megatron.interop.huggingface.family import LAYER, gate_and_up, same
from megatron.interop.huggingface.llama_families import MISTRAL
from megatron.interop.huggingface.moe_families import EXPERTS, checked_layers, loss_coefficient
from megatron.model.config import ModelConfig

_ATTENTION = "model.layers.{}.self_attn."
_SHARED = "model.layers.{}.mlp.shared_experts."
_V3_DEFAULTS = {
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
}


def _read(left: dict[str, Any], fields: dict[str, Any], *, best_of_group: int) -> None:
    """Take over the keys of experts.

    Args:
        best_of_group: experts of a group whose scores are its score. Here they follow from the other sizes.
    """
    for key in ("num_experts", "moe_ffn_hidden_size", "moe_router_topk"):
        if type(fields[key]) is not int:
            raise InputError(f"{key}: {fields[key]!r} is not an integer")
    # Null, for queries without latents, is not its default.
    fields["q_lora_rank"] = left.pop("q_lora_rank", 1536)
    shared, dense = left.pop("n_shared_experts", None), left.pop("first_k_dense_replace", 0)
    for key, value, low in (("n_shared_experts", shared, 1), ("first_k_dense_replace", dense, 0)):
        if type(value) is not int or value < low:
            raise InputError(f"{key}: {value!r} is not supported; it must be an integer of at least {low}")
    fields["moe_shared_expert_intermediate_size"] = shared * fields["moe_ffn_hidden_size"]
    fields["moe_layer_freq"] = layer_freq(layer >= dense for layer in range(checked_layers(fields)))
    scaling = left.pop("routed_scaling_factor", 1.0)
    fields["moe_router_topk_scaling_factor"] = None if scaling == 1 else scaling
    groups, used, topk = left.pop("n_group", None), left.pop("topk_group", None), fields["moe_router_topk"]
    if left.pop("topk_method", "greedy") != "greedy" and groups not in (None, 1):
        if type(used) is not int or used < 1 or (topk % used, topk // used) != (0, best_of_group):
            raise InputError(
                f"topk_group: {used} with num_experts_per_tok {topk} is not supported; a group counts by its best "
                f"{best_of_group}, so only {topk / best_of_group:g} groups are"
            )
        fields |= {"moe_router_num_groups": groups, "moe_router_group_topk": used}
    if left.pop("seq_aux", True):
        fields["moe_router_load_balancing_type"] = ("seq_aux_loss",)
    fields["moe_aux_loss_coeff"] = (left.pop("aux_loss_alpha", 0.0),)


def _write(model: ModelConfig, *, method: str) -> dict[str, Any]:
    width, shared = model.moe_ffn_hidden_size or 1, model.moe_shared_expert_intermediate_size or 0
    if not shared or shared % width:
        raise InputError(
            f"--moe-shared-expert-intermediate-size: {shared or 'none'} is not a multiple of --moe-ffn-hidden-size "
            f"{width}, which Hugging Face's DeepSeek models need"
        )
    layers = model.expert_layers(model.num_layers)
    in_sequences = "seq_aux_loss" in model.moe_router_load_balancing_type
    return {
        "num_key_value_heads": model.num_attention_heads,
        "q_lora_rank": model.q_lora_rank,
        "n_shared_experts": shared // width,
        "first_k_dense_replace": layers.index(True) if any(layers) else len(layers),
        "routed_scaling_factor": model.moe_router_topk_scaling_factor or 1.0,
        "n_group": model.moe_router_num_groups or 1,
        "topk_group": model.moe_router_group_topk or 1,
        "topk_method": method,
        "seq_aux": in_sequences,
        "aux_loss_alpha": loss_coefficient(model, "seq_aux_loss" if in_sequences else "aux_loss"),
    }


def _read_v2(left: dict[str, Any], fields: dict[str, Any]) -> None:
    if left.get("topk_method", "greedy") not in ("greedy", "group_limited_greedy"):
        raise InputError(
            f"topk_method: {left['topk_method']!r} is not supported; only 'greedy' and 'group_limited_greedy' are"
        )
    _read(left, fields, best_of_group=1)


def _write_v2(model: ModelConfig) -> dict[str, Any]:
    return _write(model, method="greedy" if model.moe_router_num_groups is None else "group_limited_greedy")


def _read_v3(left: dict[str, Any], fields: dict[str, Any]) -> None:
    left |= {**_V3_DEFAULTS, **left}
    if left["topk_method"] != "noaux_tc":
        raise InputError(f"topk_method: {left['topk_method']!r} is not supported; only 'noaux_tc' is")
    _read(left, fields, best_of_group=2)


DEEPSEEK_V3 = dataclasses.replace(
    MISTRAL,
    model_type="deepseek_v3",
    architectures=("DeepseekV3ForCausalLM",),
    modules={
        **{name: theirs for name, theirs in MISTRAL.modules.items() if not name.endswith("linear_qkv")},
        **EXPERTS,
        LAYER + "self_attention.linear_q_proj": same(f"{_ATTENTION}q_proj"),
        LAYER + "self_attention.linear_q_down_proj": same(f"{_ATTENTION}q_a_proj"),
        LAYER + "self_attention.q_layernorm": same(f"{_ATTENTION}q_a_layernorm"),
        LAYER + "self_attention.linear_q_up_proj": same(f"{_ATTENTION}q_b_proj"),
        LAYER + "self_attention.linear_kv_down_proj": same(f"{_ATTENTION}kv_a_proj_with_mqa"),
        LAYER + "self_attention.kv_layernorm": same(f"{_ATTENTION}kv_a_layernorm"),
        LAYER + "self_attention.linear_kv_up_proj": same(f"{_ATTENTION}kv_b_proj"),
        LAYER + "mlp.router.expert_bias": same("model.layers.{}.mlp.gate.e_score_correction_bias"),
        LAYER + "mlp.shared_experts.linear_fc1": gate_and_up(f"{_SHARED}gate_proj", f"{_SHARED}up_proj"),
        LAYER + "mlp.shared_experts.linear_fc2": same(f"{_SHARED}down_proj"),
    },
    settings={
        "num_hidden_layers": "num_layers",
        "hidden_size": "hidden_size",
        "num_attention_heads": "num_attention_heads",
        "max_position_embeddings": "max_position_embeddings",
        "intermediate_size": "ffn_hidden_size",
        "moe_intermediate_size": "moe_ffn_hidden_size",
        "n_routed_experts": "num_experts",
        "num_experts_per_tok": "moe_router_topk",
        "kv_lora_rank": "kv_lora_rank",
        "qk_nope_head_dim": "qk_head_dim",
        "qk_rope_head_dim": "qk_pos_emb_head_dim",
        "v_head_dim": "v_head_dim",
        "attention_dropout": "attention_dropout",
        "initializer_range": "init_method_std",
    },
    defaults={"attention_dropout": 0.0, "initializer_range": 0.02},
    shape={
        **MISTRAL.shape,
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "norm_epsilon": 1e-6,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    },
    fixed={
        **MISTRAL.fixed,
        "attention_bias": (False,),
        "rms_norm_eps": (1e-6,),  # the norms of latents have no other
        "rope_interleave": (True, None),
        "scoring_func": ("sigmoid",),
        "norm_topk_prob": (True,),
        "moe_layer_freq": (1,),
    },
    equal={"num_key_value_heads": "num_attention_heads"},
    windows={},
    unused=frozenset(
        "ep_size head_dim num_mtp_layers num_nextn_predict_layers output_router_logits qk_head_dim".split()
    ),
    older={"num_local_experts": "n_routed_experts"},
    read_keys=_read_v3,
    write_keys=functools.partial(_write, method="noaux_tc"),
)

DEEPSEEK_V2 = dataclasses.replace(
    DEEPSEEK_V3,
    model_type="deepseek_v2",
    architectures=("DeepseekV2ForCausalLM",),
    shape={
        **{key: value for key, value in DEEPSEEK_V3.shape.items() if not key.startswith("moe_router")},
        "moe_router_pre_softmax": True,
    },
    fixed={
        **{key: values for key, values in DEEPSEEK_V3.fixed.items() if key != "rope_interleave"},
        "mlp_bias": (False,),
        "scoring_func": ("softmax",),
        "norm_topk_prob": (False,),
    },
    older={"num_local_experts": "n_routed_experts", "num_experts": "n_routed_experts"},
    read_keys=_read_v2,
    write_keys=_write_v2,
)
