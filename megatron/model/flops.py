"""Floating-point operations of a model, from its sizes. Does not import torch, so that planning starts at once."""

from __future__ import annotations

import typing
from collections.abc import Iterable

from megatron.model.config import ModelConfig

if typing.TYPE_CHECKING:
    from megatron.parallel.recompute import Recompute


def flops_per_sample(
    config: ModelConfig, *, seq_length: int, padded_vocab_size: int, num_logits: int
) -> float:
    """Model FLOPs of forward and backward for one sequence, without recomputation.

    Counts matrix products only, with attention over the full square, as arXiv 2104.04473 section 5.1 does: for GPT-2
    this is 72 s L h² (1 + s / 6h + V / 12 L h).

    Args:
        num_logits: positions of the sequence that are projected to the vocabulary.
    """
    attention = _attention(config, pairs=seq_length * seq_length)
    layers = config.num_layers * (_layer(config, seq_length) + attention)
    # Backward takes twice the products of forward.
    return 3 * (layers + _vocabulary(config, padded_vocab_size, num_logits))


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
    layer, attention = _layer(config, seq_length), _attention(config, pairs=pairs)
    forward = config.num_layers * (layer + attention) + _vocabulary(config, padded_vocab_size, num_logits)
    if recompute.granularity == "selective":
        recomputed = config.num_layers * attention
    else:
        groups = (group for layers in chunks for group in recompute.groups(layers))
        recomputed = (layer + attention) * sum(len(group) for group, again in groups if again)
    return 3 * forward + recomputed


def _layer(config: ModelConfig, positions: int) -> float:
    """Forward FLOPs of the linear layers of one transformer layer, two for each multiplication and addition."""
    heads = config.num_attention_heads * config.kv_channels
    qkv = heads + 2 * config.num_query_groups * config.kv_channels
    mlp = config.ffn_hidden_size * (3 if config.gated else 2)
    return 2 * positions * config.hidden_size * (qkv + heads + mlp)


def _attention(config: ModelConfig, *, pairs: float) -> float:
    """Forward FLOPs of one layer's scores and weighted sums of values, for a number of query-key pairs."""
    return 2 * 2 * pairs * config.num_attention_heads * config.kv_channels


def _vocabulary(config: ModelConfig, padded_vocab_size: int, positions: int) -> float:
    return 2 * positions * config.hidden_size * padded_vocab_size
