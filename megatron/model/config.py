"""Flags of the model's shape."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from types import MappingProxyType

from megatron.errors import InputError
from megatron.flags import either, flag, flag_name
from megatron.model.latent_attention import LatentAttentionConfig
from megatron.model.moe_config import MoEConfig, layer_pattern
from megatron.parallel.config import ParallelConfig

# Flags that replace parts of the model (`megatron.model.variants`), with the values that do.
VARIANT_VALUES = {
    "apply_residual_connection_post_layernorm": True,
    "use_parallel_residual": True,
    "norm_after": True,
    "qk_layernorm": True,
    "qk_layernorm_all_heads": True,
    "position_embedding_type": "alibi",
    "embed_layernorm": True,
    "scale_embeddings": True,
    "apply_layernorm_1p": True,
    "multi_latent_attention": True,
}
# Flags that do so with any value but their default.
VARIANT_FLAGS = """window_size no_rope_freq softmax_scale softmax_type attn_logit_softcapping final_logit_softcapping
rotary_interleaved sandwich_norm add_expert_bias""".split()
# Flags, by the start of their names, and the flag that they need.
NEEDS = {
    "rope_scaling_": "use_rope_scaling",
    "yarn_": "use_rope_scaling",
    "window_attn_": "window_size",
    "rotary_base_": "window_size",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(MoEConfig, LatentAttentionConfig):
    """Sizes and variants of the transformer. Sizes without a value are derived from the others."""

    num_layers: int = flag(None, "number of transformer layers", low=1, high=10**5, required=True)
    hidden_size: int = flag(None, "hidden size of the residual stream", low=1, high=10**6, required=True)
    num_attention_heads: int = flag(None, "number of attention (query) heads", low=1, required=True)
    ffn_hidden_size: int = flag(None, "MLP size (default: 4 x --hidden-size, or 8/3 x with --swiglu)", low=1)
    kv_channels: int = flag(None, "size of a head (default: --hidden-size / --num-attention-heads)", low=1)
    group_query_attention: bool = flag(False, "query heads in groups that share a key and a value head")
    num_query_groups: int = flag(None, "with --group-query-attention: key-value heads (default: 1)", low=1)
    max_position_embeddings: int = flag(
        None, "longest sequence with positions (default: --seq-length)", low=1
    )
    position_embedding_type: str = flag(
        "learned_absolute", "position embeddings", choices=("learned_absolute", "rope", "alibi", "none")
    )
    embed_layernorm: bool = flag(False, "normalize the word embeddings, as in BLOOM")
    scale_embeddings: bool = flag(False, "multiply word embeddings by √(--hidden-size), as in Gemma")
    rotary_base: float = flag(10000.0, "base of the RoPE frequencies", above=0)
    rotary_percent: float = flag(1.0, "fraction of a head's channels that RoPE rotates", above=0, high=1)
    rotary_interleaved: bool = flag(False, "RoPE rotates adjacent channels together, not those of two halves")
    use_rope_scaling: bool = flag(False, "scale RoPE's low frequencies, for longer sequences than trained on")
    rope_scaling_type: str = flag(
        "llama3", "form of --use-rope-scaling, as in Hugging Face", choices=("llama3", "linear", "yarn")
    )
    rope_scaling_factor: float = flag(8.0, "divisor of the lowest frequencies in --use-rope-scaling", low=1)
    rope_scaling_original_length: int = flag(8192, "length trained on before --use-rope-scaling", low=1)
    rope_scaling_turns: tuple[float, ...] | None = flag(
        None,
        "rotations over that length below and above which a frequency is divided or kept (default: by the type)",
        above=0,
        nargs=2,
        metavar=("LOW", "HIGH"),
    )
    rope_scaling_attention_factor: float | None = flag(
        None, "with yarn: factor of cosine and sine (default: 1 + 0.1 ln(--rope-scaling-factor))", above=0
    )
    rotary_base_local: float | None = flag(None, "--rotary-base of layers with a window", above=0)
    no_rope_freq: str | None = flag(None, "layers without RoPE: N for every Nth, or 1s in '[0,0,0,1]'")
    window_size: str | None = flag(None, "'L,0': a query attends to itself and the L positions before it")
    window_attn_skip_freq: str | None = flag(None, "layers without it: N for every Nth, or 0s in '[1]*5+[0]'")
    yarn_correction_range_round_to_int: bool = flag(
        True, "yarn: channels of --rope-scaling-turns not rounded"
    )
    normalization: str = flag("LayerNorm", "type of normalization", choices=("LayerNorm", "RMSNorm"))
    norm_epsilon: float = flag(
        1e-5, "added to the variance in each norm", above=0, aliases=("--layernorm-epsilon",)
    )
    apply_layernorm_1p: bool = flag(False, "scale each norm by 1 + w, with w = 0 at first, as in Gemma")
    swiglu: bool = flag(False, "gated MLP, silu(gate) * up, instead of GELU")
    activation_function: str = flag(
        "gelu",
        "activation without --swiglu; those with glu are gated",
        choices=("gelu", "relu", "geglu", "quick_geglu"),
    )
    bias_gelu_fusion: bool = flag(
        True, "exact (erf) GELU instead of the tanh approximation, as without NVIDIA's fused kernel"
    )
    openai_gelu: bool = flag(False, "tanh approximation of GELU, even with --no-bias-gelu-fusion")
    add_bias_linear: bool = flag(True, "no biases in the linear layers", name="--disable-bias-linear")
    add_qkv_bias: bool = flag(False, "biases of queries, keys and values, even with --disable-bias-linear")
    add_attention_bias: bool = flag(False, "biases in all of attention, even with --disable-bias-linear")
    add_mlp_bias: bool = flag(False, "biases in the MLP, even with --disable-bias-linear")
    qk_layernorm: bool = flag(False, "normalize the queries and keys of each head")
    qk_layernorm_all_heads: bool = flag(False, "with --qk-layernorm: all heads together, as in OLMo 2")
    untie_embeddings_and_output_weights: bool = flag(False, "output layer with weights of its own")
    softmax_scale: float | None = flag(
        None, "factor of attention scores (default: 1 / √(head size))", above=0
    )
    softmax_type: str = flag(
        "vanilla", "key without a value in each softmax", choices=("vanilla", "off-by-one", "learnable")
    )
    attn_logit_softcapping: float | None = flag(None, "c: scores become c tanh(score / c)", above=0)
    final_logit_softcapping: float | None = flag(None, "c: logits become c tanh(logit / c)", above=0)
    mtp_num_layers: int = flag(0, "tokens after the next that training predicts, each by a layer", low=0)
    mtp_loss_scaling_factor: float = flag(0.1, "factor of the mean loss of --mtp-num-layers", above=0)
    apply_residual_connection_post_layernorm: bool = flag(False, "residual after norms, as in 2018's BERT")
    use_parallel_residual: bool = flag(False, "attention and MLP both read a layer's input, as in GPT-NeoX")
    norm_after: bool = flag(False, "normalize outputs of attention and MLP, not inputs, as in OLMo 2")
    sandwich_norm: bool = flag(False, "normalize both inputs and outputs of attention and MLP, as in Gemma 2")
    fp32_residual_connection: bool = flag(
        False, "with --bf16 or --fp16: keep the residual stream, also between pipeline stages, in fp32"
    )
    attention_dropout: float = flag(0.1, "dropout of attention probabilities", low=0, below=1)
    hidden_dropout: float = flag(0.1, "dropout of embeddings and of the output of each block", low=0, below=1)
    init_method_std: float = flag(0.02, "standard deviation of the initial weights", low=0)
    init_method_xavier_uniform: bool = flag(
        False, "Xavier uniform initialization of the layers that read the residual stream"
    )
    mask_padded_vocab: bool = flag(True, "padding of the vocabulary in the softmax, as in NVIDIA's code")

    def __post_init__(self) -> None:
        super().__post_init__()
        h, heads = self.hidden_size, self.num_attention_heads
        if self.kv_channels is None:
            if h % heads:
                raise InputError(
                    f"--num-attention-heads: {heads} does not divide --hidden-size {h}; "
                    "choose a divisor, or give --kv-channels"
                )
            object.__setattr__(self, "kv_channels", h // heads)
        if self.ffn_hidden_size is None:
            # Two thirds of the width, since a gated MLP has three matrices instead of two (as Megatron-LM).
            width = max(1, 8 * h // 3 // 64) * 64 if self.gated else 4 * h
            object.__setattr__(self, "ffn_hidden_size", width)
        if self.swiglu and self.activation_function != "gelu":
            raise InputError(
                f"--activation-function: {self.activation_function} and --swiglu exclude each other; drop one"
            )
        self._resolve_experts()
        groups = self.num_query_groups or (1 if self.group_query_attention else heads)
        if groups != heads and not self.group_query_attention:
            raise InputError(f"--num-query-groups: {groups} needs --group-query-attention")
        object.__setattr__(self, "num_query_groups", groups)
        if heads % groups:
            raise InputError(
                f"--num-query-groups: {groups} does not divide --num-attention-heads {heads}; choose a divisor"
            )
        if self.position_embedding_type == "rope" and self.rotary_channels < 2:
            raise InputError(
                f"--rotary-percent: {self.rotary_percent} of {self.kv_channels} channels per head is less than the two "
                "channels that RoPE rotates together; choose a larger fraction"
            )
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            for prefix, needed in NEEDS.items():
                if field.name.startswith(prefix) and value != field.default and not getattr(self, needed):
                    given = "" if isinstance(value, bool) else f": {value}"
                    raise InputError(f"{flag_name(field)}{given} needs --{needed.replace('_', '-')}")
        _ = self.windows  # checks their flags

    def _resolve_experts(self) -> None:
        if self.num_experts is None:
            return
        self.expert_layers(self.num_layers)  # checks the pattern
        if self.moe_ffn_hidden_size is None:
            object.__setattr__(self, "moe_ffn_hidden_size", self.ffn_hidden_size)
        if self.add_bias_linear or self.add_mlp_bias:
            remedy = "add --disable-bias-linear" if self.add_bias_linear else "leave --add-mlp-bias out"
            raise InputError(f"--num-experts: {self.num_experts} experts have no biases; {remedy}")

    @property
    def rotary_channels(self) -> int:
        """Channels of a head that RoPE rotates, an even number."""
        channels = self.qk_pos_emb_head_dim if self.multi_latent_attention else self.kv_channels
        return int(channels * self.rotary_percent) // 2 * 2

    @property
    def num_all_layers(self) -> int:
        """Transformer layers, with those of multi-token prediction."""
        return self.num_layers + self.mtp_num_layers

    @property
    def all_expert_layers(self) -> list[bool]:
        """For each of `num_all_layers`, true if its MLP is a mixture of experts."""
        layers = self.expert_layers(self.num_layers)
        return layers + layers[-1:] * self.mtp_num_layers

    @property
    def windows(self) -> list[int | None]:
        """For each of `num_layers`, the positions before its own that a query attends to; None without a window."""
        frequency, layers = self.window_attn_skip_freq, self.num_layers
        if self.window_size is None:
            return [None] * layers
        match = re.fullmatch(r"\(?(\d{1,15}), ?0\)?", self.window_size)
        if match is None:
            raise InputError(f"--window-size: {self.window_size!r} is not L,0 for a number of positions L")
        windowed = [True] * layers
        if frequency is not None:
            windowed = layer_pattern(
                "--window-attn-skip-freq", frequency, layers, lambda n, i: (i + 1) % n != 0
            )
        return [int(match[1]) if has_window else None for has_window in windowed]

    @property
    def value_channels(self) -> int:
        """Channels of a value head. Those of a query or key head are `kv_channels`."""
        return self.v_head_dim if self.multi_latent_attention else self.kv_channels

    @property
    def variants(self) -> list[str]:
        """Names of the flags in use that replace parts of the model."""
        ignored = "qk_layernorm" if self.multi_latent_attention else None  # it has norms of its own
        in_use = [name for name, value in VARIANT_VALUES.items() if getattr(self, name) == value]
        in_use += [name for name in VARIANT_FLAGS if getattr(self, name) != getattr(ModelConfig, name)]
        return [name for name in in_use if name != ignored]

    @property
    def activation(self) -> str:
        """Key of the MLP's activation in `megatron.ops.activation.ACTIVATIONS`."""
        if self.swiglu:
            return "swiglu"
        has_gelu = self.activation_function in ("gelu", "geglu")
        return self.activation_function + ("_tanh" if has_gelu and self.tanh_gelu else "")

    @property
    def gated(self) -> bool:
        """True if the MLP has a gate."""
        return self.swiglu or "glu" in self.activation_function

    @property
    def tanh_gelu(self) -> bool:
        """True if GELU is the tanh approximation."""
        return self.bias_gelu_fusion or self.openai_gelu

    def kv_heads_per_rank(self, tp: int) -> int:
        """Key and value heads on each of `tp` tensor-parallel ranks. With more ranks than heads, ranks share a head."""
        return max(self.num_query_groups // tp, 1)

    def can_split(self, ranks: int) -> bool:
        """True if so many tensor-parallel ranks can share every layer."""
        groups = self.num_query_groups
        whole_groups = groups % ranks == 0 or ranks % groups == 0
        return self.num_attention_heads % ranks == 0 and self.ffn_hidden_size % ranks == 0 and whole_groups


def check_tensor_parallel(
    model: ModelConfig, size: int, processes: int, also: Mapping[str, int] = MappingProxyType({})
) -> None:
    """Check that tensor parallelism of `size` can split every layer, and the dimensions `also`.

    Args:
        processes: ranks of a pipeline stage; the suggested sizes divide them.
        also: further dimensions to split, by the text that names them.

    Raises:
        InputError: it cannot; names the nearest sizes that can.
    """
    heads, ffn, groups = model.num_attention_heads, model.ffn_hidden_size, model.num_query_groups
    split = {f"--num-attention-heads {heads}": heads, f"--ffn-hidden-size {ffn}": ffn, **also}
    wrong = [f"does not divide {name}" for name, value in split.items() if value % size]
    if groups % size and size % groups:
        wrong.append(f"neither divides --num-query-groups {groups} nor is a multiple of it")
    if wrong:
        common = math.gcd(*split.values())
        fitting = [n for n in range(1, common + 1) if common % n == 0 and model.can_split(n)]
        fitting.sort(key=lambda n: abs(n - size))
        as_started = next(n for n in fitting if processes % n == 0)
        others = sorted([n for n in fitting if processes % n][:2])
        raise InputError(
            f"--tensor-model-parallel-size: {size} {wrong[0]}; choose {as_started}"
            + (f", or with another number of processes {either(others)}" if others else "")
        )


def check_expert_parallel(model: ModelConfig, parallel: ParallelConfig, seq_length: int) -> None:
    """Check that the ranks of a stage can divide the experts of its layers.

    Raises:
        InputError: they cannot.
    """
    experts, size = model.num_experts, parallel.expert_model_parallel_size
    parts, tp = parallel.expert_tp, parallel.tensor_model_parallel_size
    if experts is None:
        for name, value, usual in (("model", size, 1), ("tensor", parts, tp)):
            if value != usual:
                raise InputError(f"--expert-{name}-parallel-size: {value} needs --num-experts")
        return
    width, shared = model.moe_ffn_hidden_size or 0, model.moe_shared_expert_intermediate_size or 0
    source = " (from --tensor-model-parallel-size)" if parallel.expert_tensor_parallel_size is None else ""
    etp, cp = "--expert-tensor-parallel-size", parallel.context_parallel_size
    length = "--seq-length / --context-parallel-size" if cp > 1 else "--seq-length"
    for name, value, divided, total in (
        ("--expert-model-parallel-size", size, "--num-experts", experts),
        (etp, parts, "--moe-ffn-hidden-size", width),
        (etp, parts, "--hidden-size", model.add_expert_bias * model.hidden_size),
        ("--tensor-model-parallel-size", tp, "--moe-shared-expert-intermediate-size", shared),
        ("--tensor-model-parallel-size", tp, length, seq_length // cp),  # each rank routes a part
    ):
        if total % value:
            fitting = either(n for n in range(1, value) if total % n == 0)
            raise InputError(
                f"{name}: {value}{source if name == etp else ''} does not divide {divided} {total}, as --num-experts "
                f"needs; choose {fitting}"
            )
