"""Mixtures of experts that `megatron plan` knows by name, as their launchers in scripts/ train them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Mixture:
    """A published mixture of experts, and the size of its run.

    Attributes:
        fields: of the model's config.
    """

    fields: Mapping[str, Any]
    vocab_size: int
    seq_length: int
    global_batch_size: int
    gpus: int


_LLAMA: dict[str, Any] = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "moe_grouped_gemm": True,
}
_QWEN3: dict[str, Any] = _LLAMA | {
    "kv_channels": 128,
    "group_query_attention": True,
    "num_query_groups": 4,
    "qk_layernorm": True,
    "num_experts": 128,
    "moe_router_topk": 8,
    "moe_aux_loss_coeff": (0.001,),
}
_MIXTRAL: dict[str, Any] = _LLAMA | {
    "num_layers": 32,
    "hidden_size": 4096,
    "ffn_hidden_size": 14336,
    "num_attention_heads": 32,
    "group_query_attention": True,
    "num_query_groups": 8,
    "num_experts": 8,
    "moe_aux_loss_coeff": (0.01,),
}
_QWEN3_30B: dict[str, Any] = _QWEN3 | {
    "num_layers": 48,
    "hidden_size": 2048,
    "ffn_hidden_size": 6144,
    "num_attention_heads": 32,
    "moe_ffn_hidden_size": 768,
}
_QWEN3_235B: dict[str, Any] = _QWEN3 | {
    "num_layers": 94,
    "hidden_size": 4096,
    "ffn_hidden_size": 12288,
    "num_attention_heads": 64,
    "moe_ffn_hidden_size": 1536,
}
_DEEPSEEK_V3: dict[str, Any] = _LLAMA | {
    "num_layers": 61,
    "hidden_size": 7168,
    "ffn_hidden_size": 18432,
    "num_attention_heads": 128,
    "multi_latent_attention": True,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "qk_layernorm": True,
    "num_experts": 256,
    "moe_router_topk": 8,
    "moe_ffn_hidden_size": 2048,
    "moe_layer_freq": "[0]*3+[1]*58",
    "moe_shared_expert_intermediate_size": 2048,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_num_groups": 8,
    "moe_router_group_topk": 4,
    "moe_router_topk_scaling_factor": 2.5,
    "moe_router_load_balancing_type": ("seq_aux_loss",),
    "moe_aux_loss_coeff": (0.0001,),
}
# arXiv 2401.04088, 2505.09388 and 2412.19437. Batches and GPUs are those of the launchers, for Qwen3-235B-A22B those of
# NVIDIA's published run.
MIXTURES = {
    "mixtral-8x7b": Mixture(_MIXTRAL, 32000, 4096, 256, 64),
    "qwen3-30b-a3b": Mixture(_QWEN3_30B, 151936, 4096, 1024, 16),
    "qwen3-235b-a22b": Mixture(_QWEN3_235B, 151936, 4096, 8192, 256),
    "deepseek-v3": Mixture(_DEEPSEEK_V3, 129280, 4096, 15360, 2048),
}
