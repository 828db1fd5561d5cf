"""Small Hugging Face models with random weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

VOCAB = 100
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
GPT2 = {"vocab_size": VOCAB, "n_positions": 32, "n_embd": 64, "n_layer": 2, "n_head": 4}
SCALED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED |= {"rope_theta": 500000.0, "original_max_position_embeddings": 8192}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 8}
OPT = {key: value for key, value in SIZES.items() if key != "intermediate_size"}
OPT |= {"ffn_dim": 160, "word_embed_proj_dim": 64, "pad_token_id": None}
PHI3 = {**SIZES, "num_key_value_heads": 2, "partial_rotary_factor": 0.5, "pad_token_id": 0}
BLOOM = {"vocab_size": VOCAB, "hidden_size": 48, "n_layer": 2, "n_head": 6, "seq_length": 32}
GEMMA = {**SIZES, "num_key_value_heads": 1, "head_dim": 32, "pad_token_id": None}
GEMMA2 = {**GEMMA, "num_hidden_layers": 4, "num_key_value_heads": 2, "sliding_window": 8}
GEMMA2 |= {"query_pre_attn_scalar": 24, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}
GEMMA3 = {key: value for key, value in GEMMA2.items() if not key.endswith("softcapping")}
GEMMA3 |= {"layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]}
GEMMA3_LINEAR = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
MIXTRAL = {**SIZES, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
OLMOE = {**SIZES, "num_experts": 8, "num_experts_per_tok": 3, "pad_token_id": None, "eos_token_id": None}
GPT_OSS = {**MIXTRAL, "num_hidden_layers": 4, "head_dim": 16, "sliding_window": 8}
GPT_OSS_YARN = {**YARN, "truncate": False, "rope_theta": 150000.0, "beta_slow": 1.0, "beta_fast": 32.0}
QWEN_MOE = {
    **SIZES,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 48,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.01,
}
QWEN2_MOE = {**QWEN_MOE, "shared_expert_intermediate_size": 80}
DEEPSEEK = {
    **SIZES,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
}
DEEPSEEK_YARN = {**YARN, "mscale": 0.9, "mscale_all_dim": 0.7}
KINDS = {
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "gpt2 of exact gelu": ("GPT2LMHeadModel", {**GPT2, "activation_function": "gelu", "n_inner": 96}),
    "gpt2 untied": ("GPT2LMHeadModel", {**GPT2, "tie_word_embeddings": False}),
    "llama": ("LlamaForCausalLM", {**SIZES, "num_key_value_heads": 2}),
    "llama 3": ("LlamaForCausalLM", {**SIZES, "num_key_value_heads": 1, "rope_parameters": SCALED}),
    "llama tied": ("LlamaForCausalLM", {**SIZES, "head_dim": 32, "tie_word_embeddings": True}),
    "llama linear": ("LlamaForCausalLM", {**SIZES, "mlp_bias": True, "rope_parameters": LINEAR}),
    "llama yarn": ("LlamaForCausalLM", {**SIZES, "attention_bias": True, "rope_parameters": YARN}),
    "llama yarn of other turns": (
        "LlamaForCausalLM",
        {**SIZES, "rope_parameters": {**YARN, "beta_slow": 0.3, "beta_fast": 2.0}},
    ),
    "llama yarn of exact turns": (
        "LlamaForCausalLM",
        {**SIZES, "rope_parameters": {**YARN, "beta_slow": 0.3, "beta_fast": 2.0, "truncate": False}},
    ),
    "llama yarn of an attention factor": (
        "LlamaForCausalLM",
        {**SIZES, "rope_parameters": {**YARN, "attention_factor": 1.5}},
    ),
    "llama yarn of mscales": (
        "LlamaForCausalLM",
        {**SIZES, "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 2.0}},
    ),
    "llama yarn of one mscale": (
        "LlamaForCausalLM",
        {**SIZES, "rope_parameters": {**YARN, "mscale": 0.7}},
    ),
    "llama 3 of other turns": (
        "LlamaForCausalLM",
        {
            **SIZES,
            "rope_parameters": {
                **SCALED,
                "original_max_position_embeddings": 16,
                "low_freq_factor": 0.1,
                "high_freq_factor": 2.0,
            },
        },
    ),
    "mistral": ("MistralForCausalLM", {**SIZES, "num_key_value_heads": 2, "sliding_window": None}),
    "mistral of windows": ("MistralForCausalLM", {**SIZES, "num_key_value_heads": 2, "sliding_window": 8}),
    "phi3": ("Phi3ForCausalLM", PHI3),
    "phi3 of windows": ("Phi3ForCausalLM", {**PHI3, "sliding_window": 8}),
    "qwen2": ("Qwen2ForCausalLM", {**SIZES, "num_key_value_heads": 2}),
    "qwen2 of windows": (
        "Qwen2ForCausalLM",
        {
            **SIZES,
            "num_key_value_heads": 2,
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 1,
        },
    ),
    "qwen3": ("Qwen3ForCausalLM", {**SIZES, "num_key_value_heads": 2, "head_dim": 24}),
    "olmo2": ("Olmo2ForCausalLM", {**SIZES, "num_key_value_heads": 2}),
    "mixtral": ("MixtralForCausalLM", MIXTRAL),
    "olmoe": ("OlmoeForCausalLM", OLMOE),
    "olmoe of normalized weights": ("OlmoeForCausalLM", {**OLMOE, "norm_topk_prob": True}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", QWEN2_MOE),
    "qwen2_moe of dense layers": (
        "Qwen2MoeForCausalLM",
        {**QWEN2_MOE, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [1]},
    ),
    "qwen2_moe of windows": (
        "Qwen2MoeForCausalLM",
        {
            **QWEN2_MOE,
            "num_hidden_layers": 4,
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 2,
        },
    ),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {**QWEN_MOE, "head_dim": 24, "norm_topk_prob": True}),
    "qwen3_moe of windows": (
        "Qwen3MoeForCausalLM",
        {**QWEN_MOE, "use_sliding_window": True, "sliding_window": 8},
    ),
    "qwen3_moe of a dense layer": ("Qwen3MoeForCausalLM", {**QWEN_MOE, "mlp_only_layers": [0]}),
    "gpt_oss": ("GptOssForCausalLM", {**GPT_OSS, "rope_parameters": GPT_OSS_YARN}),
    "deepseek_v2": ("DeepseekV2ForCausalLM", {**DEEPSEEK, "q_lora_rank": None, "routed_scaling_factor": 1.5}),
    "deepseek_v2 of groups": (
        "DeepseekV2ForCausalLM",
        {**DEEPSEEK, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        {**DEEPSEEK, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4},
    ),
    "deepseek_v3 of yarn": (
        "DeepseekV3ForCausalLM",
        {**DEEPSEEK, "n_group": 1, "topk_group": 1, "rope_parameters": DEEPSEEK_YARN},
    ),
    "gemma": ("GemmaForCausalLM", GEMMA),
    "gemma2": ("Gemma2ForCausalLM", GEMMA2),
    "gemma3": ("Gemma3ForCausalLM", GEMMA3),
    "gemma3 of linear": (
        "Gemma3ForCausalLM",
        {**GEMMA3, "rope_parameters": GEMMA3_LINEAR, "final_logit_softcapping": 3.0},
    ),
    "opt": ("OPTForCausalLM", OPT),
    "gpt_neox": ("GPTNeoXForCausalLM", {**SIZES, "hidden_act": "gelu_new"}),
    "gpt_neox in series": ("GPTNeoXForCausalLM", {**SIZES, "use_parallel_residual": False}),
    "bloom": ("BloomForCausalLM", BLOOM),
    "bloom of post norm": (
        "BloomForCausalLM",
        {**BLOOM, "apply_residual_connection_post_layernorm": True},
    ),
    "bert": ("MegatronBertForPreTraining", SIZES),
    "bert of tanh gelu": ("MegatronBertForPreTraining", {**SIZES, "hidden_act": "gelu_new"}),
    "bert of words": ("MegatronBertForMaskedLM", SIZES),
}


def save_hf(folder: Path, kind: str, dtype: torch.dtype = torch.float32, **fields: object) -> Path:
    """Save a model of a kind with the given configuration fields; skips without transformers."""
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    architecture, settings = KINDS[kind]
    model_class = getattr(transformers, architecture)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**{**settings, **fields}))
    for p in model.parameters():
        p.data.normal_(std=0.2)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.02)
    if kind == "opt":  # rows of padding
        model.model.decoder.embed_positions.weight.data[:2] = 0
    if kind == "bert of words":
        model.bert.embeddings.token_type_embeddings.weight.data.zero_()
    model.to(dtype).save_pretrained(folder)
    return folder
