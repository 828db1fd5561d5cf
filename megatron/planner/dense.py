"""Published dense models that `megatron plan` knows by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.planner.mixtures import LLAMA
from megatron.planner.models import Preset

_QWEN2: dict[str, Any] = LLAMA | {"add_qkv_bias": True}
_QWEN3: dict[str, Any] = LLAMA | {"qk_layernorm": True, "kv_channels": 128}
_TIED: dict[str, Any] = {"untie_embeddings_and_output_weights": False}
_GEMMA: dict[str, Any] = (LLAMA | _TIED) | {
    "swiglu": False,
    "activation_function": "geglu",
    "apply_layernorm_1p": True,
    "scale_embeddings": True,
    "kv_channels": 256,
}
_GEMMA2: dict[str, Any] = _GEMMA | {
    "sandwich_norm": True,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "window_size": "4095,0",
    "window_attn_skip_freq": "2",
}
_GEMMA3: dict[str, Any] = _GEMMA | {"sandwich_norm": True, "qk_layernorm": True, "window_attn_skip_freq": "6"}


def _models(
    prefix: str, fields: dict[str, Any], vocab_size: int, seq_length: int, sizes: dict[str, tuple[Any, ...]]
) -> Iterator[tuple[str, Preset]]:
    """Yield the models of a family.

    `sizes` are layers, hidden size, heads, key-value heads and MLP size, and fields in which a size differs from its
    family; `vocab_size` is one of these.
    """
    for size, (layers, hidden, heads, groups, ffn, *others) in sizes.items():
        shape = {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
        shape |= {"ffn_hidden_size": ffn, **(others[0] if others else {})}
        if groups != heads:
            shape |= {"group_query_attention": True, "num_query_groups": groups}
        vocab = shape.pop("vocab_size", vocab_size)
        yield prefix + size, Preset(fields | shape, vocab, seq_length)


_MORE: dict[str, Any] = {"vocab_size": 152064}
DENSE: dict[str, Preset] = dict(
    [
        # OpenAI's GPT-2; the 1.5B of its paper. GPT-3: arXiv 2005.14165 table 2.1, whose 13B has heads of 128.
        *_models("gpt2", {}, 50257, 1024, {
            "": (12, 768, 12, 12, 3072),
            "-medium": (24, 1024, 16, 16, 4096),
            "-large": (36, 1280, 20, 20, 5120),
            "-xl": (48, 1600, 25, 25, 6400),
        }),
        *_models("gpt3-", {}, 50257, 2048, {
            "6.7b": (32, 4096, 32, 32, 16384),
            "13b": (40, 5120, 40, 40, 20480),
            "175b": (96, 12288, 96, 96, 49152),
        }),
        # arXiv 2302.13971, 2307.09288 and 2407.21783; Llama 3.2's model cards.
        *_models("llama-", LLAMA, 32000, 2048, {
            "7b": (32, 4096, 32, 32, 11008),
            "13b": (40, 5120, 40, 40, 13824),
            "30b": (60, 6656, 52, 52, 17920),
            "65b": (80, 8192, 64, 64, 22016),
        }),
        *_models("llama2-", LLAMA, 32000, 4096, {
            "7b": (32, 4096, 32, 32, 11008),
            "13b": (40, 5120, 40, 40, 13824),
            "70b": (80, 8192, 64, 8, 28672),
        }),
        *_models("llama3-", LLAMA, 128256, 8192, {
            "8b": (32, 4096, 32, 8, 14336),
            "70b": (80, 8192, 64, 8, 28672),
        }),
        *_models("llama3.2-", LLAMA | _TIED, 128256, 8192, {
            "1b": (16, 2048, 32, 8, 8192),
            "3b": (28, 3072, 24, 8, 8192),
        }),
        # arXiv 2412.15115 and 2505.09388.
        *_models("qwen2.5-", _QWEN2, 151936, 4096, {
            "0.5b": (24, 896, 14, 2, 4864, _TIED),
            "1.5b": (28, 1536, 12, 2, 8960, _TIED),
            "3b": (36, 2048, 16, 2, 11008, _TIED),
            "7b": (28, 3584, 28, 4, 18944, _MORE),
            "14b": (48, 5120, 40, 8, 13824, _MORE),
            "32b": (64, 5120, 40, 8, 27648, _MORE),
            "72b": (80, 8192, 64, 8, 29568, _MORE),
        }),
        *_models("qwen3-", _QWEN3, 151936, 4096, {
            "0.6b": (28, 1024, 16, 8, 3072, _TIED),
            "1.7b": (28, 2048, 16, 8, 6144, _TIED),
            "4b": (36, 2560, 32, 8, 9728, _TIED),
            "8b": (36, 4096, 32, 8, 12288),
            "14b": (40, 5120, 40, 8, 17408),
            "32b": (64, 5120, 64, 8, 25600),
        }),
        # arXiv 2310.06825 (whose window is 4,096 positions); model cards of Nemo and Small 3.
        *_models("mistral-", LLAMA, 131072, 8192, {
            "7b": (32, 4096, 32, 8, 14336, {"vocab_size": 32000, "window_size": "4095,0"}),
            "nemo-12b": (40, 5120, 32, 8, 14336, {"kv_channels": 128}),
            "small-24b": (40, 5120, 32, 8, 32768, {"kv_channels": 128}),
        }),
        # arXiv 2403.08295, 2408.00118 and 2503.19786 (without the vision encoder).
        *_models("gemma-", _GEMMA, 256000, 8192, {
            "2b": (18, 2048, 8, 1, 16384),
            "7b": (28, 3072, 16, 16, 24576),
        }),
        *_models("gemma2-", _GEMMA2, 256000, 8192, {
            "2b": (26, 2304, 8, 4, 9216),
            "9b": (42, 3584, 16, 8, 14336),
            "27b": (46, 4608, 32, 16, 36864, {"kv_channels": 128}),
        }),
        *_models("gemma3-", _GEMMA3, 262144, 8192, {
            "1b": (26, 1152, 4, 1, 6912, {"window_size": "511,0"}),
            "4b": (34, 2560, 8, 4, 10240, {"window_size": "1023,0"}),
            "12b": (48, 3840, 16, 8, 15360, {"window_size": "1023,0"}),
            "27b": (62, 5376, 32, 16, 21504, {"window_size": "1023,0", "kv_channels": 128}),
        }),
    ]
) | {
    # The run of 2407.21783 table 4: 16 million tokens a step on 16,384 GPUs.
    "llama3.1-405b": Preset(
        LLAMA
        | {
            "num_layers": 126,
            "hidden_size": 16384,
            "num_attention_heads": 128,
            "group_query_attention": True,
            "num_query_groups": 8,
            "ffn_hidden_size": 53248,
        },
        128256,
        8192,
        2048,
        16384,
    )
}  # fmt: skip
