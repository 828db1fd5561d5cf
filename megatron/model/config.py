"""Flags of the network itself."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType

from megatron.flags import Config, InputError, either, flag


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(Config):
    """Sizes and variants of the transformer. What is left out follows from the rest."""

    num_layers: int = flag(None, "number of transformer layers", low=1, high=10**5, required=True)
    hidden_size: int = flag(None, "width of the residual stream", low=1, high=10**6, required=True)
    num_attention_heads: int = flag(None, "number of attention (query) heads", low=1, required=True)
    ffn_hidden_size: int | None = flag(
        None, "width of the MLP (default: 4 times hidden, or 8/3 times with --swiglu)", low=1
    )
    kv_channels: int | None = flag(None, "width of one head (default: hidden / heads)", low=1)
    group_query_attention: bool = flag(False, "share each key and value head among a group of query heads")
    num_query_groups: int | None = flag(
        None, "number of key and value heads, with --group-query-attention (default: 1)", low=1
    )
    max_position_embeddings: int | None = flag(
        None, "longest sequence, and rows of the table of learned positions (default: --seq-length)", low=1
    )
    position_embedding_type: str = flag(
        "learned_absolute", "how positions enter", choices=("learned_absolute", "rope", "none")
    )
    rotary_base: float = flag(10000.0, "base of the RoPE frequencies", above=0)
    rotary_percent: float = flag(1.0, "share of each head that RoPE turns", above=0, high=1)
    use_rope_scaling: bool = flag(
        False,
        "slow RoPE's slow frequencies down as Llama 3.1 does, to see more than the 8192 tokens trained on",
    )
    rope_scaling_factor: float = flag(
        8.0, "how many times slower the slowest become with --use-rope-scaling", low=1
    )
    normalization: str = flag("LayerNorm", "kind of normalisation", choices=("LayerNorm", "RMSNorm"))
    norm_epsilon: float = flag(
        1e-5, "added to the variance in the normalisation", above=0, aliases=("--layernorm-epsilon",)
    )
    swiglu: bool = flag(False, "gated MLP: silu(gate) * up, in place of GELU")
    bias_gelu_fusion: bool = flag(
        True, "exact (erf) GELU in place of the tanh form, as when NVIDIA's fused kernel is turned off"
    )
    openai_gelu: bool = flag(False, "tanh form of GELU, even with --no-bias-gelu-fusion")
    add_bias_linear: bool = flag(True, "no biases in the linear layers", name="--disable-bias-linear")
    add_qkv_bias: bool = flag(
        False, "biases in the projection to queries, keys and values, even with --disable-bias-linear"
    )
    qk_layernorm: bool = flag(False, "normalise every head's queries and keys")
    untie_embeddings_and_output_weights: bool = flag(
        False, "give the output layer a weight of its own instead of the word embeddings"
    )
    apply_residual_connection_post_layernorm: bool = flag(
        False, "add to what a normalisation gives, not to what it reads: the order of the original BERT"
    )
    fp32_residual_connection: bool = flag(
        False, "with --bf16 or --fp16: keep the residual stream, and what pipelines send of it, in fp32"
    )
    attention_dropout: float = flag(0.1, "dropout on attention probabilities", low=0, high=1)
    hidden_dropout: float = flag(0.1, "dropout on embeddings and on the output of each block", low=0, high=1)
    init_method_std: float = flag(0.02, "standard deviation of the initial weights", low=0)
    init_method_xavier_uniform: bool = flag(
        False, "Xavier uniform initial weights for the layers that read the residual stream"
    )
    mask_padded_vocab: bool = flag(
        True, "let the padding of the vocabulary take part in the softmax, as NVIDIA's code does"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("max_position_embeddings")
        h, heads = self.hidden_size, self.num_attention_heads
        if self.kv_channels is None:
            if h % heads:
                raise InputError(
                    f"--num-attention-heads: {heads} does not divide --hidden-size {h}; "
                    "choose a divisor, or give --kv-channels"
                )
            object.__setattr__(self, "kv_channels", h // heads)
        if self.ffn_hidden_size is None:
            # With a gate the MLP has three matrices; two thirds of the width keep its size (as NVIDIA's).
            object.__setattr__(
                self, "ffn_hidden_size", max(1, 8 * h // 3 // 64) * 64 if self.swiglu else 4 * h
            )
        groups = self.num_query_groups or (1 if self.group_query_attention else heads)
        if groups != heads and not self.group_query_attention:
            raise InputError(f"--num-query-groups: {groups} has an effect only with --group-query-attention")
        object.__setattr__(self, "num_query_groups", groups)
        if heads % groups:
            raise InputError(
                f"--num-query-groups: {groups} does not divide --num-attention-heads {heads}; choose a divisor"
            )
        if self.position_embedding_type == "rope" and self.rotary_channels < 2:
            raise InputError(
                f"--rotary-percent: {self.rotary_percent} of a head of {self.kv_channels} channels leaves "
                "RoPE fewer than the two it turns together"
            )

        if self.rope_scaling_factor != 8.0 and not self.use_rope_scaling:
            raise InputError(
                f"--rope-scaling-factor: {self.rope_scaling_factor} has an effect only with --use-rope-scaling"
            )

    @property
    def rotary_channels(self) -> int:
        """Channels of a head that RoPE turns, an even number."""
        return int(self.kv_channels * self.rotary_percent) // 2 * 2

    @property
    def tanh_gelu(self) -> bool:
        """Whether GELU takes its tanh form."""
        return self.bias_gelu_fusion or self.openai_gelu


def check_tensor_parallel(
    model: ModelConfig, size: int, processes: int, also: Mapping[str, int] = MappingProxyType({})
) -> None:
    """Make sure that tensor parallelism of a `size` can divide every layer, and what else is to be divided.

    Args:
        processes: of a pipeline stage, which another size should divide.
        also: what a person calls it, and how much of it there is.

    Raises:
        InputError: naming the nearest sizes that can.
    """
    heads, ffn, groups = model.num_attention_heads, model.ffn_hidden_size, model.num_query_groups
    divided = {f"--num-attention-heads {heads}": heads, f"--ffn-hidden-size {ffn}": ffn, **also}
    wrong = [f"does not divide {name}" for name, value in divided.items() if value % size]
    if groups % size and size % groups:
        wrong.append(f"neither divides --num-query-groups {groups} nor is a multiple of it")
    if wrong:
        common = math.gcd(*divided.values())
        fitting = [
            n for n in range(1, common + 1) if common % n == 0 and (groups % n == 0 or n % groups == 0)
        ]
        fitting.sort(key=lambda n: abs(n - size))
        as_started = next(n for n in fitting if processes % n == 0)
        others = sorted([n for n in fitting if processes % n][:2])
        raise InputError(
            f"--tensor-model-parallel-size: {size} {wrong[0]}; choose {as_started}"
            + (f", or with another number of processes {either(others)}" if others else "")
        )
