"""The arithmetic of a model, by its sizes alone; without torch, so that planning starts at once."""

from __future__ import annotations

import typing
from collections.abc import Iterable

from megatron.model.config import ModelConfig

if typing.TYPE_CHECKING:
    from megatron.parallel.recompute import Recompute


def flops_per_sample(
    config: ModelConfig, *, seq_length: int, padded_vocab_size: int, vocab_positions: int
) -> float:
    """Floating-point operations of forward and backward for one sequence, nothing recomputed.

    Counts the matrix products alone, attention over the full square, as arXiv 2104.04473 does in its section
    5.1: for GPT-2's shape this is 72 s L h² (1 + s / 6h + V / 12 L h).

    Args:
        vocab_positions: of the sequence's positions, those that are projected to the vocabulary.
    """
    attention = _attention(config, pairs=seq_length * seq_length)
    layers = config.num_layers * (_layer(config, seq_length) + attention)
    # Backward does twice what forward does.
    return 3 * (layers + _vocabulary(config, padded_vocab_size, vocab_positions))


def exact_flops_per_sample(
    config: ModelConfig,
    *,
    seq_length: int,
    padded_vocab_size: int,
    vocab_positions: int,
    causal: bool,
    recompute: Recompute,
    chunks: Iterable[int],
) -> float:
    """The same of the products that a run needs: of causal attention the half that the mask leaves, with what
    `recompute` does again.

    Not counted is what an operation repeats inside: scores in backward of FlashAttention, logits of a large vocabulary.

    Args:
        causal: whether a position attends to none after it.
        chunks: the number of layers of each chunk of the whole model.
    """
    pairs = seq_length * (seq_length + 1) / 2 if causal else seq_length * seq_length
    layer, attention = _layer(config, seq_length), _attention(config, pairs=pairs)
    again = sum(len(group) for layers in chunks for group, again in recompute.groups(layers) if again)
    forward = config.num_layers * (layer + attention)
    repeated = again * (layer + attention)
    if recompute.granularity == "selective":
        repeated = config.num_layers * attention
    return 3 * (forward + _vocabulary(config, padded_vocab_size, vocab_positions)) + repeated


def _qkv_width(config: ModelConfig) -> int:
    return (config.num_attention_heads + 2 * config.num_query_groups) * config.kv_channels


def _mlp_inputs(config: ModelConfig) -> int:
    return config.ffn_hidden_size * (2 if config.swiglu else 1)


def _layer(config: ModelConfig, positions: int) -> float:
    """Operations, two a multiplication and addition, of one layer's forward pass but for attention itself."""
    heads = config.num_attention_heads * config.kv_channels
    weights = _qkv_width(config) + heads + _mlp_inputs(config) + config.ffn_hidden_size
    return 2 * positions * config.hidden_size * weights


def _attention(config: ModelConfig, *, pairs: float) -> float:
    """Of one layer's scores, and of the sums they weight, for so many pairs of a query and a key."""
    return 2 * 2 * pairs * config.num_attention_heads * config.kv_channels


def _vocabulary(config: ModelConfig, padded_vocab_size: int, positions: int) -> float:
    return 2 * positions * config.hidden_size * padded_vocab_size
