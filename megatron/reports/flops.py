"""Floating-point operations that a model really performs, with recomputation."""

from __future__ import annotations

from collections.abc import Iterable

from megatron.model.config import ModelConfig
from megatron.model.flops import attention_flops, layer_flops, vocabulary_flops
from megatron.parallel.recompute import Recompute


def exact_flops_per_sample(
    config: ModelConfig,
    *,
    seq_length: int,
    padded_vocab_size: int,
    num_logits: int,
    causal: bool,
    recompute: Recompute,
    chunks: Iterable[int],
) -> float:
    """Hardware FLOPs of forward and backward for one sequence: half of causal attention, and recomputation.

    Leaves out the recomputation inside an operation: scores in backward of FlashAttention, logits of the fused linear
    cross-entropy.

    Args:
        causal: a position attends to no later one.
        chunks: number of layers of each chunk of the whole model.
    """
    pairs = seq_length * (seq_length + 1) / 2 if causal else seq_length * seq_length
    layer, attention = layer_flops(config, seq_length), attention_flops(config, pairs=pairs)
    forward = config.num_layers * (layer + attention) + vocabulary_flops(
        config, padded_vocab_size, num_logits
    )
    if recompute.granularity == "selective":
        recomputed = config.num_layers * attention
    else:
        groups = (group for layers in chunks for group in recompute.groups(layers))
        recomputed = (layer + attention) * sum(len(group) for group, again in groups if again)
    return 3 * forward + recomputed
