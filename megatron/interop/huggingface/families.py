"""The model families of transformers that this program supports, with tables of their modules and settings.

Reading and writing use the same tables. A native tensor corresponds to one or several tensors of transformers.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.model.config import ModelConfig


def join_qkv(parts: Sequence[Tensor], config: ModelConfig) -> Tensor:
    """Join the rows of separate query, key and value projections: for each group its queries, its key, its value."""
    groups, width = config.num_query_groups, config.kv_channels
    by_group = [x.reshape(groups, -1, width, *x.shape[1:]) for x in parts]
    return torch.cat(by_group, dim=1).flatten(0, 2)


def split_qkv(qkv: Tensor, config: ModelConfig) -> list[Tensor]:
    """The inverse of `join_qkv`."""
    groups, width = config.num_query_groups, config.kv_channels
    queries = config.num_attention_heads // groups
    by_group = qkv.view(groups, queries + 2, width, *qkv.shape[1:])
    return [x.flatten(0, 2) for x in by_group.split((queries, 1, 1), dim=1)]


@dataclasses.dataclass(frozen=True)
class Modules:
    """The modules of transformers that correspond to a native module.

    Attributes:
        names: their names, with `{}` for the index of the layer.
        join: makes the native weight or bias from theirs.
        split: makes their weights or biases from the native one.
    """

    names: tuple[str, ...]
    join: Callable[[Sequence[Tensor], ModelConfig], Tensor] = lambda parts, config: parts[0]
    split: Callable[[Tensor, ModelConfig], list[Tensor]] = lambda x, config: [x]


def same(name: str) -> Modules:
    return Modules((name,))


def transposed(name: str) -> Modules:
    """A `Conv1D`, with a weight of [inputs, outputs]."""
    return Modules((name,), lambda parts, config: parts[0].t(), lambda x, config: [x.t()])


def separate_qkv(*names: str) -> Modules:
    return Modules(names, join_qkv, split_qkv)


def fused_qkv(name: str) -> Modules:
    """A projection whose outputs are all queries, then all keys, then all values."""

    def join(parts: Sequence[Tensor], config: ModelConfig) -> Tensor:
        kv = config.num_query_groups * config.kv_channels
        return join_qkv(parts[0].split((len(parts[0]) - 2 * kv, kv, kv)), config)

    return Modules((name,), join, lambda qkv, config: [torch.cat(split_qkv(qkv, config))])


def transposed_qkv(name: str) -> Modules:
    """A `Conv1D` whose outputs are all queries, then all keys, then all values."""
    return Modules(
        (name,),
        lambda parts, config: join_qkv(parts[0].t().chunk(3), config),
        lambda qkv, config: [torch.cat(split_qkv(qkv, config)).t()],
    )


def gate_and_up(*names: str) -> Modules:
    return Modules(names, lambda parts, config: torch.cat(tuple(parts)), lambda x, config: list(x.chunk(2)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A model family of transformers.

    Attributes:
        model_type: its name in config.json.
        architectures: classes of transformers that load such a model; the second is for BERT without the binary head.
        prefix: start of the names of all tensors except those of the heads; files of a model without heads lack it.
        modules: the corresponding modules of transformers, by native module.
        ignored: matches names of tensors to skip: constants, and copies of tied embeddings.
        settings: keys of config.json, with the equivalent fields of ModelConfig.
        defaults: values of settings that config.json may omit.
        shape: fields of ModelConfig that are the same for the whole family.
        fixed: the supported values of further keys of config.json.
        activation: the key of config.json for the form of GELU, and its default; None for a gated MLP.
        tied: the default of tie_word_embeddings.
        older: older names of settings.
        equal: keys that must have the value of another key, or none.
        windows: the keys of attention windows, with their defaults.
        rope_types: the supported values of rope_type.
    """

    model_type: str
    architectures: tuple[str, ...]
    prefix: str
    modules: Mapping[str, Modules]
    ignored: str
    settings: Mapping[str, str]
    defaults: Mapping[str, Any]
    shape: Mapping[str, Any]
    fixed: Mapping[str, tuple[Any, ...]]
    activation: tuple[str, str] | None
    tied: bool
    older: Mapping[str, str] = dataclasses.field(default_factory=dict)
    equal: Mapping[str, str] = dataclasses.field(default_factory=dict)
    windows: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rope_types: tuple[str, ...] = ("default", "linear", "dynamic", "llama3", "yarn")

    def architecture(self, task: str) -> str:
        """The class of transformers that loads the model with its heads."""
        return self.architectures[-1 if task == "BERT --bert-no-binary-head" else 0]

    def tensors(self, name: str) -> tuple[list[str], Modules]:
        """The names of the tensors of transformers that correspond to a native tensor, and their conversion."""
        layer = re.search(r"(?<=\.layers\.)[0-9]+", name)
        pattern = re.sub(r"(?<=\.layers\.)[0-9]+", "{}", name)
        module, _, kind = pattern.rpartition(".")  # weight or bias
        modules = self.modules[module]
        return [f"{theirs.format(layer and layer.group())}.{kind}" for theirs in modules.names], modules


_LAYER = "decoder.layers.{}."

GPT2 = Family(
    model_type="gpt2",
    architectures=("GPT2LMHeadModel",),
    prefix="transformer.",
    modules={
        "embedding.word_embeddings": same("transformer.wte"),
        "embedding.position_embeddings": same("transformer.wpe"),
        _LAYER + "input_layernorm": same("transformer.h.{}.ln_1"),
        _LAYER + "self_attention.linear_qkv": transposed_qkv("transformer.h.{}.attn.c_attn"),
        _LAYER + "self_attention.linear_proj": transposed("transformer.h.{}.attn.c_proj"),
        _LAYER + "pre_mlp_layernorm": same("transformer.h.{}.ln_2"),
        _LAYER + "mlp.linear_fc1": transposed("transformer.h.{}.mlp.c_fc"),
        _LAYER + "mlp.linear_fc2": transposed("transformer.h.{}.mlp.c_proj"),
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

MISTRAL = Family(
    model_type="mistral",
    architectures=("MistralForCausalLM",),
    prefix="model.",
    modules={
        "embedding.word_embeddings": same("model.embed_tokens"),
        _LAYER + "input_layernorm": same("model.layers.{}.input_layernorm"),
        _LAYER + "self_attention.linear_qkv": separate_qkv(
            "model.layers.{}.self_attn.q_proj",
            "model.layers.{}.self_attn.k_proj",
            "model.layers.{}.self_attn.v_proj",
        ),
        _LAYER + "self_attention.linear_proj": same("model.layers.{}.self_attn.o_proj"),
        _LAYER + "pre_mlp_layernorm": same("model.layers.{}.post_attention_layernorm"),
        _LAYER + "mlp.linear_fc1": gate_and_up(
            "model.layers.{}.mlp.gate_proj", "model.layers.{}.mlp.up_proj"
        ),
        _LAYER + "mlp.linear_fc2": same("model.layers.{}.mlp.down_proj"),
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
        "num_key_value_heads": None,
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
    defaults={**MISTRAL.defaults, "attention_bias": False, "mlp_bias": False},
    windows={},
)

_QWEN_WINDOWS = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}

QWEN2 = dataclasses.replace(
    MISTRAL,
    model_type="qwen2",
    architectures=("Qwen2ForCausalLM",),
    shape={**MISTRAL.shape, "add_qkv_bias": True},
    windows=_QWEN_WINDOWS,
)

_QK_NORMS = {
    _LAYER + "self_attention.q_layernorm": same("model.layers.{}.self_attn.q_norm"),
    _LAYER + "self_attention.k_layernorm": same("model.layers.{}.self_attn.k_norm"),
}

QWEN3 = dataclasses.replace(
    MISTRAL,
    model_type="qwen3",
    architectures=("Qwen3ForCausalLM",),
    modules={**MISTRAL.modules, **_QK_NORMS},
    settings={**MISTRAL.settings, "attention_bias": "add_attention_bias"},
    defaults={**MISTRAL.defaults, "head_dim": 128, "attention_bias": False},
    shape={**MISTRAL.shape, "qk_layernorm": True},
    windows=_QWEN_WINDOWS,
)

PHI3 = dataclasses.replace(
    MISTRAL,
    model_type="phi3",
    architectures=("Phi3ForCausalLM",),
    modules={
        **MISTRAL.modules,
        _LAYER + "self_attention.linear_qkv": fused_qkv("model.layers.{}.self_attn.qkv_proj"),
        _LAYER + "mlp.linear_fc1": same("model.layers.{}.mlp.gate_up_proj"),
    },
    settings={
        **MISTRAL.settings,
        "resid_pdrop": "hidden_dropout",
        "partial_rotary_factor": "rotary_percent",
    },
    defaults={**MISTRAL.defaults, "rms_norm_eps": 1e-5, "resid_pdrop": 0.0, "partial_rotary_factor": 1.0},
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
        _LAYER + "post_self_attn_layernorm": same("model.layers.{}.post_attention_layernorm"),
        _LAYER + "post_mlp_layernorm": same("model.layers.{}.post_feedforward_layernorm"),
        "decoder.final_layernorm": same("model.norm"),
    },
    settings={
        **{key: field for key, field in MISTRAL.settings.items() if key != "head_dim"},
        "attention_bias": "add_attention_bias",
    },
    defaults={**MISTRAL.defaults, "rms_norm_eps": 1e-5, "attention_bias": False},
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
        _LAYER + "input_layernorm": same("model.decoder.layers.{}.self_attn_layer_norm"),
        _LAYER + "self_attention.linear_qkv": separate_qkv(
            "model.decoder.layers.{}.self_attn.q_proj",
            "model.decoder.layers.{}.self_attn.k_proj",
            "model.decoder.layers.{}.self_attn.v_proj",
        ),
        _LAYER + "self_attention.linear_proj": same("model.decoder.layers.{}.self_attn.out_proj"),
        _LAYER + "pre_mlp_layernorm": same("model.decoder.layers.{}.final_layer_norm"),
        _LAYER + "mlp.linear_fc1": same("model.decoder.layers.{}.fc1"),
        _LAYER + "mlp.linear_fc2": same("model.decoder.layers.{}.fc2"),
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
        _LAYER + "input_layernorm": same("gpt_neox.layers.{}.input_layernorm"),
        _LAYER + "self_attention.linear_qkv": same("gpt_neox.layers.{}.attention.query_key_value"),
        _LAYER + "self_attention.linear_proj": same("gpt_neox.layers.{}.attention.dense"),
        _LAYER + "pre_mlp_layernorm": same("gpt_neox.layers.{}.post_attention_layernorm"),
        _LAYER + "mlp.linear_fc1": same("gpt_neox.layers.{}.mlp.dense_h_to_4h"),
        _LAYER + "mlp.linear_fc2": same("gpt_neox.layers.{}.mlp.dense_4h_to_h"),
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
        _LAYER + "input_layernorm": same("transformer.h.{}.input_layernorm"),
        _LAYER + "self_attention.linear_qkv": same("transformer.h.{}.self_attention.query_key_value"),
        _LAYER + "self_attention.linear_proj": same("transformer.h.{}.self_attention.dense"),
        _LAYER + "pre_mlp_layernorm": same("transformer.h.{}.post_attention_layernorm"),
        _LAYER + "mlp.linear_fc1": same("transformer.h.{}.mlp.dense_h_to_4h"),
        _LAYER + "mlp.linear_fc2": same("transformer.h.{}.mlp.dense_4h_to_h"),
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

_GPTS = (GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, PHI3, OLMO2, GEMMA, OPT, GPT_NEOX, BLOOM)
FAMILIES = {family.model_type: family for family in (*_GPTS, MEGATRON_BERT)}
