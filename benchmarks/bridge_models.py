"""Models of the published runs in the form of Megatron Bridge."""

from __future__ import annotations

from typing import Any

from megatron.model.config import ModelConfig


def model_of(name: str, shape: dict[str, Any], seq_length: int) -> ModelConfig:
    """The model of a row in the form of Megatron Bridge."""
    fields: dict[str, Any] = {
        "num_layers": shape["layers"],
        "hidden_size": shape["hidden"],
        "ffn_hidden_size": shape["ffn_hidden"],
        "num_attention_heads": shape["heads"],
        "kv_channels": shape["head_dim"],
        "max_position_embeddings": seq_length,
        "swiglu": shape["swiglu"],
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "untie_embeddings_and_output_weights": not shape.get("tied_embeddings", False),
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }
    if "Qwen3" in name.replace("-", ""):
        fields["qk_layernorm"] = True
    if shape.get("sliding_window"):  # in every second layer (2508.10925 section 2.3)
        fields |= {"window_size": f"{shape['sliding_window'] - 1},0", "window_attn_skip_freq": "2"}
    if shape["kv_heads"] != shape["heads"]:
        fields |= {"group_query_attention": True, "num_query_groups": shape["kv_heads"]}
    if shape.get("attention") == "MLA":
        fields.pop("kv_channels")
        fields |= {
            "multi_latent_attention": True,
            "q_lora_rank": shape["q_lora_rank"],
            "kv_lora_rank": shape["kv_lora_rank"],
            "qk_head_dim": shape["qk_nope_head_dim"],
            "qk_pos_emb_head_dim": shape["qk_rope_head_dim"],
            "v_head_dim": shape["v_head_dim"],
            "qk_layernorm": True,
        }
    if shape["kind"] == "moe":
        dense = shape["first_dense_layers"]
        fields |= {
            "num_experts": shape["experts"],
            "moe_router_topk": shape["topk"],
            "moe_ffn_hidden_size": shape["moe_ffn_hidden"],
            "moe_grouped_gemm": True,
            "moe_router_score_function": "sigmoid" if dense else "softmax",
            "mtp_num_layers": shape.get("mtp_layers") or 0,
        }
        if shape["shared_expert_ffn"]:
            fields["moe_shared_expert_intermediate_size"] = shape["shared_expert_ffn"]
        if name.startswith("DeepSeek"):  # node-limited routing (2412.19437 section 4.2)
            fields |= {"moe_router_num_groups": 8, "moe_router_group_topk": 4}
        if dense:
            fields["moe_layer_freq"] = f"[0]*{dense}+[1]*{shape['layers'] - dense}"
    return ModelConfig(**fields)
