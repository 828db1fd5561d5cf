"""Tables of the model families of transformers that are mixtures of experts, and their keys of config.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from megatron.errors import InputError
from megatron.interop.experts import layer_freq
from megatron.interop.huggingface.family import LAYER, Family, Modules, gate_and_up, same, transposed
from megatron.interop.huggingface.llama_families import MISTRAL, OLMO2, QWEN2, QWEN3
from megatron.model.config import ModelConfig

_MLP = "model.layers.{}.mlp."


def _experts(prefix: str, gate: str, up: str, down: str) -> dict[str, Modules]:
    """The modules of a router and its experts, which begin with `prefix`, and the names of an expert's projections."""
    names = [f"{prefix}experts.{{expert}}.{name}.weight" for name in (gate, up, down)]
    return {
        LAYER + "mlp.router": same(f"{prefix}gate"),
        LAYER + "mlp.experts.weight1": gate_and_up(*names[:2]),
        LAYER + "mlp.experts.weight2": transposed(names[2]),
    }


EXPERTS = _experts(_MLP, "gate_proj", "up_proj", "down_proj")


def _read_loss(left: dict[str, Any], fields: dict[str, Any]) -> None:
    """Take over the coefficient of the auxiliary loss."""
    fields["moe_aux_loss_coeff"] = (left.pop("router_aux_loss_coef", 0.001),)


def loss_coefficient(model: ModelConfig, kind: str = "aux_loss") -> float:
    """The coefficient of an auxiliary loss."""
    types = zip(model.moe_router_load_balancing_type, model.moe_aux_loss_coeff, strict=True)
    return dict(types).get(kind, 0.0)


def _read_mixtral(left: dict[str, Any], fields: dict[str, Any]) -> None:
    _read_loss(left, fields)
    fields["ffn_hidden_size"] = fields["moe_ffn_hidden_size"]  # there are no other MLPs


def _write_mixtral(model: ModelConfig) -> dict[str, Any]:
    return {"router_aux_loss_coef": loss_coefficient(model)}


def _read_normalized(left: dict[str, Any], fields: dict[str, Any]) -> None:
    """Take over norm_topk_prob: a softmax of all experts normalized to the chosen ones is the softmax of these."""
    fields["moe_router_pre_softmax"] = not left.pop("norm_topk_prob", False)


def _read_olmoe(left: dict[str, Any], fields: dict[str, Any]) -> None:
    left.setdefault("router_aux_loss_coef", 0.01)
    _read_mixtral(left, fields)
    _read_normalized(left, fields)


def _write_olmoe(model: ModelConfig) -> dict[str, Any]:
    return _write_mixtral(model) | {"norm_topk_prob": not model.moe_router_pre_softmax}


def _read_qwen(left: dict[str, Any], fields: dict[str, Any]) -> None:
    _read_loss(left, fields)
    _read_normalized(left, fields)
    step, dense = left.pop("decoder_sparse_step", 1), left.pop("mlp_only_layers", None) or []
    if type(step) is not int or step < 1:
        raise InputError(f"decoder_sparse_step: {step!r} is not a positive integer")
    if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
        raise InputError(f"mlp_only_layers: {str(dense)[:80]} is not a list of layers")
    layers = range(checked_layers(fields))
    fields["moe_layer_freq"] = layer_freq((i + 1) % step == 0 and i not in dense for i in layers)


def _write_qwen(model: ModelConfig) -> dict[str, Any]:
    layers = enumerate(model.expert_layers(model.num_layers))
    dense = [layer for layer, has_experts in layers if not has_experts]
    return _write_olmoe(model) | {"decoder_sparse_step": 1, "mlp_only_layers": dense}


def checked_layers(fields: dict[str, Any]) -> int:
    """The number of layers.

    Raises:
        InputError: it is not that of a model.
    """
    layers = fields["num_layers"]
    if type(layers) is not int or not 1 <= layers <= 10**5:
        raise InputError(f"num_hidden_layers: {layers!r} is not a number of layers up to 100,000")
    return layers


MIXTRAL = dataclasses.replace(
    MISTRAL,
    model_type="mixtral",
    architectures=("MixtralForCausalLM",),
    modules={**MISTRAL.modules, **_experts("model.layers.{}.block_sparse_moe.", "w1", "w3", "w2")},
    settings={
        **MISTRAL.settings,
        "intermediate_size": "moe_ffn_hidden_size",
        "num_local_experts": "num_experts",
        "num_experts_per_tok": "moe_router_topk",
    },
    defaults={**MISTRAL.defaults, "rms_norm_eps": 1e-5},
    fixed={**MISTRAL.fixed, "router_jitter_noise": (0.0, None)},
    windows={"sliding_window": None},
    unused=frozenset({"output_router_logits"}),
    rope_theta=1e6,
    read_keys=_read_mixtral,
    write_keys=_write_mixtral,
)

OLMOE = dataclasses.replace(
    OLMO2,
    model_type="olmoe",
    architectures=("OlmoeForCausalLM",),
    modules={
        **MISTRAL.modules,
        **{name: OLMO2.modules[name] for name in OLMO2.modules if "self_attention" in name},
        **EXPERTS,
    },
    settings={
        **OLMO2.settings,
        "intermediate_size": "moe_ffn_hidden_size",
        "num_experts": "num_experts",
        "num_experts_per_tok": "moe_router_topk",
    },
    defaults={**OLMO2.defaults, "num_experts": 64, "num_experts_per_tok": 8},
    shape={key: value for key, value in OLMO2.shape.items() if key != "norm_after"},
    fixed={**OLMO2.fixed, "clip_qkv": (None,)},
    unused=frozenset({"output_router_logits"}),
    read_keys=_read_olmoe,
    write_keys=_write_olmoe,
)

_QWEN_SETTINGS = {
    "moe_intermediate_size": "moe_ffn_hidden_size",
    "num_experts": "num_experts",
    "num_experts_per_tok": "moe_router_topk",
}


def _qwen2_moe_layers(found: dict[str, Any], layers: int) -> list[bool]:
    return [layer % 2 == 0 and layer < found["max_window_layers"] for layer in range(layers)]


QWEN2_MOE = dataclasses.replace(
    QWEN2,
    model_type="qwen2_moe",
    architectures=("Qwen2MoeForCausalLM",),
    modules={
        **QWEN2.modules,
        **EXPERTS,
        LAYER + "mlp.shared_experts.linear_fc1": gate_and_up(
            f"{_MLP}shared_expert.gate_proj", f"{_MLP}shared_expert.up_proj"
        ),
        LAYER + "mlp.shared_experts.linear_fc2": same(f"{_MLP}shared_expert.down_proj"),
        LAYER + "mlp.shared_experts.gate_weight": same(f"{_MLP}shared_expert_gate.weight"),
    },
    settings={
        **QWEN2.settings,
        **_QWEN_SETTINGS,
        "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
        "qkv_bias": "add_qkv_bias",
    },
    defaults={**QWEN2.defaults, "num_key_value_heads": 16, "qkv_bias": True},
    shape={
        **{key: value for key, value in QWEN2.shape.items() if key != "add_qkv_bias"},
        "moe_shared_expert_gate": True,
    },
    window_layers=_qwen2_moe_layers,
    unused=frozenset({"output_router_logits"}),
    read_keys=_read_qwen,
    write_keys=_write_qwen,
)

QWEN3_MOE = dataclasses.replace(
    QWEN3,
    model_type="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM",),
    modules={**QWEN3.modules, **EXPERTS},
    settings={**QWEN3.settings, **_QWEN_SETTINGS},
    defaults={**QWEN3.defaults, "head_dim": None, "num_key_value_heads": 4},
    windows={"use_sliding_window": False, "sliding_window": 4096},
    window_layers=None,  # a window is that of all layers
    unused=frozenset({"output_router_logits", "max_window_layers"}),
    older={"num_local_experts": "num_experts"},
    read_keys=_read_qwen,
    write_keys=_write_qwen,
)


def _join_gpt_oss(parts: Sequence[Tensor], config: ModelConfig) -> Tensor:
    """Columns, or elements of a bias, that alternate between gate and up, to rows of all gates and then all ups."""
    by_expert = parts[0] if parts[0].dim() == 2 else parts[0].transpose(1, 2)  # [e, 2f] or [e, 2f, h]
    return by_expert.unflatten(1, (-1, 2)).transpose(1, 2).flatten(0, 2)


def _split_gpt_oss(x: Tensor, config: ModelConfig) -> list[Tensor]:
    """The inverse."""
    by_expert = x.unflatten(0, (config.num_experts or 0, 2, -1)).transpose(1, 2).flatten(1, 2)
    return [by_expert if by_expert.dim() == 2 else by_expert.transpose(1, 2)]


def _stacked(name: str) -> Modules:
    """A tensor with the matrices, or biases, of all experts."""
    return Modules(
        (name,),
        lambda parts, config: parts[0].flatten(0, 1),
        lambda x, config: [x.unflatten(0, (config.num_experts or 0, -1))],
    )


GPT_OSS = dataclasses.replace(
    MIXTRAL,
    model_type="gpt_oss",
    architectures=("GptOssForCausalLM",),
    modules={
        **MISTRAL.modules,
        LAYER + "self_attention.core_attention.softmax_offset": same("model.layers.{}.self_attn.sinks"),
        LAYER + "mlp.router": same(f"{_MLP}router"),
        LAYER + "mlp.experts.weight1": Modules(
            (f"{_MLP}experts.gate_up_proj",), _join_gpt_oss, _split_gpt_oss
        ),
        LAYER + "mlp.experts.bias1": Modules(
            (f"{_MLP}experts.gate_up_proj_bias",), _join_gpt_oss, _split_gpt_oss
        ),
        LAYER + "mlp.experts.weight2": _stacked(f"{_MLP}experts.down_proj"),
        LAYER + "mlp.experts.bias2": _stacked(f"{_MLP}experts.down_proj_bias"),
    },
    settings={**MIXTRAL.settings, "attention_bias": "add_attention_bias"},
    defaults={**MIXTRAL.defaults, "head_dim": 64, "attention_bias": True},
    shape={
        **{key: value for key, value in MIXTRAL.shape.items() if key != "swiglu"},
        "activation_function": "quick_geglu",
        "softmax_type": "learnable",
        "add_expert_bias": True,
    },
    fixed={**MISTRAL.fixed, "swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)},
    windows={"sliding_window": 128},
    window_layers=lambda found, layers: [layer % 2 == 0 for layer in range(layers)],
    unused=frozenset({"output_router_logits", "experts_per_token", "initial_context_length"}),
    rope_theta=150000.0,
    rope_parameters={
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
)

MOE_FAMILIES: tuple[Family, ...] = (MIXTRAL, OLMOE, QWEN2_MOE, QWEN3_MOE, GPT_OSS)
