"""Mixtures of experts that `megatron plan` knows by name, as their launchers in scripts/ train them."""

from __future__ import annotations

from typing import Any

from megatron.planner.models import Preset

LLAMA: dict[str, Any] = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}
_MIXTURE: dict[str, Any] = LLAMA | {"moe_grouped_gemm": True}
_QWEN3: dict[str, Any] = _MIXTURE | {
    "kv_channels": 128,
    "group_query_attention": True,
    "num_query_groups": 4,
    "qk_layernorm": True,
    "num_experts": 128,
    "moe_router_topk": 8,
    "moe_aux_loss_coeff": (0.001,),
}
_MIXTRAL: dict[str, Any] = _MIXTURE | {
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
_DEEPSEEK_V3: dict[str, Any] = _MIXTURE | {
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
_MIXTRAL_LARGE: dict[str, Any] = _MIXTRAL | {
    "num_layers": 56,
    "hidden_size": 6144,
    "ffn_hidden_size": 16384,
    "num_attention_heads": 48,
}
_KIMI_K2: dict[str, Any] = _DEEPSEEK_V3 | {
    "num_attention_heads": 64,
    "num_experts": 384,
    "moe_layer_freq": "[0]*1+[1]*60",
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
    "moe_router_topk_scaling_factor": 2.827,
}
# Learned sinks, biases of attention and of experts, and a window of 128 positions in every second layer.
_GPT_OSS: dict[str, Any] = _MIXTURE | {
    "hidden_size": 2880,
    "ffn_hidden_size": 2880,
    "num_attention_heads": 64,
    "kv_channels": 64,
    "group_query_attention": True,
    "num_query_groups": 8,
    "swiglu": False,
    "activation_function": "quick_geglu",
    "add_attention_bias": True,
    "add_expert_bias": True,
    "softmax_type": "learnable",
    "window_size": "127,0",
    "window_attn_skip_freq": "2",
    "moe_router_topk": 4,
    "moe_aux_loss_coeff": (0.001,),
}
# arXiv 2401.04088, 2505.09388, 2412.19437, 2507.20534 and 2508.10925; Mixtral 8x22B's model card. Batches and GPUs are
# those of the launchers, for Qwen3-235B-A22B those of NVIDIA's published run.
MIXTURES = {
    "mixtral-8x7b": Preset(_MIXTRAL, 32000, 4096, 256, 64),
    "mixtral-8x22b": Preset(_MIXTRAL_LARGE, 32768, 4096, 256, 256),
    "qwen3-30b-a3b": Preset(_QWEN3_30B, 151936, 4096, 1024, 16),
    "qwen3-235b-a22b": Preset(_QWEN3_235B, 151936, 4096, 8192, 256),
    "deepseek-v3": Preset(_DEEPSEEK_V3, 129280, 4096, 15360, 2048),
    "kimi-k2": Preset(_KIMI_K2, 163840, 4096, 16384),
    "gpt-oss-20b": Preset(_GPT_OSS | {"num_layers": 24, "num_experts": 32}, 201088, 4096, 1024),
    "gpt-oss-120b": Preset(_GPT_OSS | {"num_layers": 36, "num_experts": 128}, 201088, 4096, 1024),
}
