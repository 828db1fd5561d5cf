"""Floating-point operations that a model really performs, with recomputation, and parameters that a token uses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from megatron.model.config import ModelConfig
from megatron.model.flops import (
    attended_pairs,
    attention_flops,
    joining_flops,
    layer_flops,
    mlp_weights,
    routed_flops,
    shared_flops,
    vocabulary_flops,
)

if TYPE_CHECKING:  # it imports torch
    from megatron.parallel.recompute import Recompute


def exact_flops_per_sample(
    config: ModelConfig,
    *,
    seq_length: int,
    padded_vocab_size: int,
    num_logits: int,
    causal: bool,
    recompute: Recompute | None = None,
    chunks: Iterable[Sequence[int]] = (),
) -> float:
    """Hardware FLOPs of forward and backward for one sequence: half of causal attention, and recomputation.

    Leaves out the recomputation inside an operation: scores in backward of FlashAttention, logits of the fused linear
    cross-entropy. Tokens that experts drop count as if they were not.

    Args:
        causal: a position attends to no later one.
        recompute: None for no recomputation.
        chunks: layers of each chunk of the whole model, whose layers `recompute` groups.
    """
    expert_layers = config.all_expert_layers
    attention = [
        attention_flops(config, pairs=pairs) for pairs in attended_pairs(config, seq_length, causal=causal)
    ]
    linear = [layer_flops(config, seq_length, has_experts=has) for has in expert_layers]
    layers = [sum(parts) for parts in zip(attention, linear, strict=True)]
    forward = sum(layers) + joining_flops(config, seq_length)
    forward += vocabulary_flops(config, padded_vocab_size, num_logits)
    if recompute is None:
        recomputed = 0.0
    elif recompute.granularity == "selective":
        recomputed = sum(attention)
    else:
        alone = [[config.num_layers + i] for i in range(config.mtp_num_layers)]
        recomputed = sum(
            layers[chunk[i]]
            for chunk in (*chunks, *alone)
            for group, is_recomputed in recompute.groups(len(chunk))
            for i in (group if is_recomputed else ())
        )
    if config.moe_layer_recompute:  # within a recomputed layer as well
        again = routed_flops(config, seq_length)
        if config.moe_shared_expert_overlap:
            again += shared_flops(config, seq_length)
        recomputed += sum(expert_layers) * again
    return 3 * forward + recomputed


def unused_parameters(config: ModelConfig) -> int:
    """Number of parameters that a token does not use: those of the experts that it does not pass.

    All others are its active parameters, the embeddings included.
    """
    if config.num_experts is None or config.moe_ffn_hidden_size is None:
        return 0
    layers, others = sum(config.all_expert_layers), config.num_experts - config.moe_router_topk
    return layers * others * mlp_weights(config, config.moe_ffn_hidden_size)
