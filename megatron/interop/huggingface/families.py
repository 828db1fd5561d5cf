"""Tables of the model families of transformers that this program supports."""

from __future__ import annotations

import torch

from megatron.interop.huggingface.deepseek_families import DEEPSEEK_V2, DEEPSEEK_V3
from megatron.interop.huggingface.family import (
    LAYER,
    Family,
    Modules,
    same,
    separate_qkv,
    transposed,
    transposed_qkv,
)
from megatron.interop.huggingface.llama_families import (
    GEMMA,
    GEMMA2,
    GEMMA3,
    LLAMA,
    MISTRAL,
    OLMO2,
    PHI3,
    QWEN2,
    QWEN3,
)
from megatron.interop.huggingface.moe_families import MOE_FAMILIES

GPT2 = Family(
    model_type="gpt2",
    architectures=("GPT2LMHeadModel",),
    prefix="transformer.",
    modules={
        "embedding.word_embeddings": same("transformer.wte"),
        "embedding.position_embeddings": same("transformer.wpe"),
        LAYER + "input_layernorm": same("transformer.h.{}.ln_1"),
        LAYER + "self_attention.linear_qkv": transposed_qkv("transformer.h.{}.attn.c_attn"),
        LAYER + "self_attention.linear_proj": transposed("transformer.h.{}.attn.c_proj"),
        LAYER + "pre_mlp_layernorm": same("transformer.h.{}.ln_2"),
        LAYER + "mlp.linear_fc1": transposed("transformer.h.{}.mlp.c_fc"),
        LAYER + "mlp.linear_fc2": transposed("transformer.h.{}.mlp.c_proj"),
        "decoder.final_layernorm": same("transformer.ln_f"),
        "output_layer": same("lm_head"),
    },
    ignored=r"(.*\.)?h\.[0-9]+\.attn\.(bias|masked_bias)",
    settings={
        "n_layer": "num_layers",
        "n_embd": "hidden_size",
        "n_head": "num_attention_heads",
        "n_positions": "max_position_embeddings",
        "n_inner": "ffn_hidden_size",
        "layer_norm_epsilon": "norm_epsilon",
        "attn_pdrop": "attention_dropout",
        "resid_pdrop": "hidden_dropout",
        "initializer_range": "init_method_std",
    },
    defaults={
        "n_inner": None,
        "layer_norm_epsilon": 1e-5,
        "attn_pdrop": 0.1,
        "resid_pdrop": 0.1,
        "initializer_range": 0.02,
    },
    shape={},
    fixed={
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    activation=("activation_function", "gelu_new"),
    tied=True,
)

OPT = Family(
    model_type="opt",
    architectures=("OPTForCausalLM",),
    prefix="model.",
    modules={
        "embedding.word_embeddings": same("model.decoder.embed_tokens"),
        # The first two rows are for padding.
        "embedding.position_embeddings": Modules(
            ("model.decoder.embed_positions",),
            lambda parts, config: parts[0][2:],
            lambda x, config: [torch.cat((x.new_zeros(2, x.shape[1]), x))],
        ),
        LAYER + "input_layernorm": same("model.decoder.layers.{}.self_attn_layer_norm"),
        LAYER + "self_attention.linear_qkv": separate_qkv(
            "model.decoder.layers.{}.self_attn.q_proj",
            "model.decoder.layers.{}.self_attn.k_proj",
            "model.decoder.layers.{}.self_attn.v_proj",
        ),
        LAYER + "self_attention.linear_proj": same("model.decoder.layers.{}.self_attn.out_proj"),
        LAYER + "pre_mlp_layernorm": same("model.decoder.layers.{}.final_layer_norm"),
        LAYER + "mlp.linear_fc1": same("model.decoder.layers.{}.fc1"),
        LAYER + "mlp.linear_fc2": same("model.decoder.layers.{}.fc2"),
        "decoder.final_layernorm": same("model.decoder.final_layer_norm"),
        "output_layer": same("lm_head"),
    },
    ignored="",
    settings={
        "num_hidden_layers": "num_layers",
        "hidden_size": "hidden_size",
        "num_attention_heads": "num_attention_heads",
        "max_position_embeddings": "max_position_embeddings",
        "ffn_dim": "ffn_hidden_size",
        "attention_dropout": "attention_dropout",
        "dropout": "hidden_dropout",
        "init_std": "init_method_std",
    },
    defaults={"attention_dropout": 0.0, "dropout": 0.1, "init_std": 0.02},
    shape={"activation_function": "relu", "norm_epsilon": 1e-5},
    fixed={
        "activation_function": ("relu",),
        "do_layer_norm_before": (True,),
        "_remove_final_layer_norm": (False,),
        "enable_bias": (True,),
        "layer_norm_elementwise_affine": (True,),
        "layerdrop": (0.0,),
    },
    equal={"word_embed_proj_dim": "hidden_size"},  # not so in the model of 350M parameters
    activation=None,
    tied=True,
)

GPT_NEOX = Family(
    model_type="gpt_neox",
    architectures=("GPTNeoXForCausalLM",),
    prefix="gpt_neox.",
    modules={
        "embedding.word_embeddings": same("gpt_neox.embed_in"),
        LAYER + "input_layernorm": same("gpt_neox.layers.{}.input_layernorm"),
        LAYER + "self_attention.linear_qkv": same("gpt_neox.layers.{}.attention.query_key_value"),
        LAYER + "self_attention.linear_proj": same("gpt_neox.layers.{}.attention.dense"),
        LAYER + "pre_mlp_layernorm": same("gpt_neox.layers.{}.post_attention_layernorm"),
        LAYER + "mlp.linear_fc1": same("gpt_neox.layers.{}.mlp.dense_h_to_4h"),
        LAYER + "mlp.linear_fc2": same("gpt_neox.layers.{}.mlp.dense_4h_to_h"),
        "decoder.final_layernorm": same("gpt_neox.final_layer_norm"),
        "output_layer": same("embed_out"),
    },
    ignored=r"(.*\.)?attention\.(bias|masked_bias|rotary_emb\.inv_freq)",
    settings={
        "num_hidden_layers": "num_layers",
        "hidden_size": "hidden_size",
        "num_attention_heads": "num_attention_heads",
        "max_position_embeddings": "max_position_embeddings",
        "intermediate_size": "ffn_hidden_size",
        "layer_norm_eps": "norm_epsilon",
        "attention_dropout": "attention_dropout",
        "hidden_dropout": "hidden_dropout",
        "initializer_range": "init_method_std",
        "use_parallel_residual": "use_parallel_residual",
        "partial_rotary_factor": "rotary_percent",
    },
    defaults={
        "layer_norm_eps": 1e-5,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "initializer_range": 0.02,
        "use_parallel_residual": True,
        "partial_rotary_factor": 0.25,
    },
    shape={"position_embedding_type": "rope"},
    fixed={"attention_bias": (True,), "is_decoder": (False, True)},
    activation=("hidden_act", "gelu"),
    tied=False,
    older={"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"},
    rope_types=("default",),
)

BLOOM = Family(
    model_type="bloom",
    architectures=("BloomForCausalLM",),
    prefix="transformer.",
    modules={
        "embedding.word_embeddings": same("transformer.word_embeddings"),
        "embedding.word_embeddings.norm": same("transformer.word_embeddings_layernorm"),
        LAYER + "input_layernorm": same("transformer.h.{}.input_layernorm"),
        LAYER + "self_attention.linear_qkv": same("transformer.h.{}.self_attention.query_key_value"),
        LAYER + "self_attention.linear_proj": same("transformer.h.{}.self_attention.dense"),
        LAYER + "pre_mlp_layernorm": same("transformer.h.{}.post_attention_layernorm"),
        LAYER + "mlp.linear_fc1": same("transformer.h.{}.mlp.dense_h_to_4h"),
        LAYER + "mlp.linear_fc2": same("transformer.h.{}.mlp.dense_4h_to_h"),
        "decoder.final_layernorm": same("transformer.ln_f"),
        "output_layer": same("lm_head"),
    },
    ignored="",
    settings={
        "n_layer": "num_layers",
        "hidden_size": "hidden_size",
        "n_head": "num_attention_heads",
        "seq_length": "max_position_embeddings",
        "layer_norm_epsilon": "norm_epsilon",
        "apply_residual_connection_post_layernorm": "apply_residual_connection_post_layernorm",
        "attention_dropout": "attention_dropout",
        "hidden_dropout": "hidden_dropout",
        "initializer_range": "init_method_std",
    },
    defaults={
        "seq_length": 2048,
        "layer_norm_epsilon": 1e-5,
        "apply_residual_connection_post_layernorm": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "initializer_range": 0.02,
    },
    shape={"position_embedding_type": "alibi", "embed_layernorm": True, "openai_gelu": True},
    fixed={"n_inner": (None,), "slow_but_exact": (False, True)},  # the second is an order of sums
    activation=None,
    tied=True,
    older={"n_embed": "hidden_size", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
)

MEGATRON_BERT = Family(
    model_type="megatron-bert",
    architectures=("MegatronBertForPreTraining", "MegatronBertForMaskedLM"),
    prefix="bert.",
    modules={
        "embedding.word_embeddings": same("bert.embeddings.word_embeddings"),
        "embedding.position_embeddings": same("bert.embeddings.position_embeddings"),
        "embedding.tokentype_embeddings": same("bert.embeddings.token_type_embeddings"),
        "encoder.layers.{}.input_layernorm": same("bert.encoder.layer.{}.attention.ln"),
        "encoder.layers.{}.self_attention.linear_qkv": separate_qkv(
            "bert.encoder.layer.{}.attention.self.query",
            "bert.encoder.layer.{}.attention.self.key",
            "bert.encoder.layer.{}.attention.self.value",
        ),
        "encoder.layers.{}.self_attention.linear_proj": same("bert.encoder.layer.{}.attention.output.dense"),
        "encoder.layers.{}.pre_mlp_layernorm": same("bert.encoder.layer.{}.ln"),
        "encoder.layers.{}.mlp.linear_fc1": same("bert.encoder.layer.{}.intermediate.dense"),
        "encoder.layers.{}.mlp.linear_fc2": same("bert.encoder.layer.{}.output.dense"),
        "encoder.final_layernorm": same("bert.encoder.ln"),
        "lm_head.dense": same("cls.predictions.transform.dense"),
        "lm_head.layer_norm": same("cls.predictions.transform.LayerNorm"),
        "output_layer": same("cls.predictions"),  # only its bias; the weight is tied
        "pooler.dense": same("bert.pooler.dense"),
        "binary_head": same("cls.seq_relationship"),
    },
    ignored=r"(bert\.)?embeddings\.position_ids|cls\.predictions\.decoder\.(weight|bias)",
    settings={
        "num_hidden_layers": "num_layers",
        "hidden_size": "hidden_size",
        "num_attention_heads": "num_attention_heads",
        "max_position_embeddings": "max_position_embeddings",
        "intermediate_size": "ffn_hidden_size",
        "layer_norm_eps": "norm_epsilon",
        "attention_probs_dropout_prob": "attention_dropout",
        "hidden_dropout_prob": "hidden_dropout",
        "initializer_range": "init_method_std",
    },
    defaults={
        "layer_norm_eps": 1e-12,
        "attention_probs_dropout_prob": 0.1,
        "hidden_dropout_prob": 0.1,
        "initializer_range": 0.02,
    },
    shape={},
    fixed={
        "type_vocab_size": (2,),
        "position_embedding_type": ("absolute",),
        "is_decoder": (False,),
        "add_cross_attention": (False,),
        "tie_word_embeddings": (True,),
    },
    activation=("hidden_act", "gelu"),
    tied=True,
)

_GPTS = (GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, PHI3, OLMO2, GEMMA, GEMMA2, GEMMA3, OPT, GPT_NEOX, BLOOM)
FAMILIES = {
    family.model_type: family for family in (*_GPTS, *MOE_FAMILIES, DEEPSEEK_V2, DEEPSEEK_V3, MEGATRON_BERT)
}
