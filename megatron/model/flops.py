"""Floating-point operations of a model, from its sizes. Does not import torch, so that planning starts at once."""

from __future__ import annotations

from megatron.model.config import ModelConfig


def flops_per_sample(
    config: ModelConfig, *, seq_length: int, padded_vocab_size: int, num_logits: int
) -> float:
    """Model FLOPs of forward and backward for one sequence, without recomputation.

    Counts matrix products only, with attention over the full square, as arXiv 2104.04473 section 5.1 does: for GPT-2
    this is 72 s L h² (1 + s / 6h + V / 12 L h).

    Args:
        num_logits: positions of the sequence that are projected to the vocabulary.
    """
    attention = attention_flops(config, pairs=seq_length * seq_length)
    layers = config.num_layers * (layer_flops(config, seq_length) + attention)
    # Backward takes twice the products of forward.
    return 3 * (layers + vocabulary_flops(config, padded_vocab_size, num_logits))


def layer_flops(config: ModelConfig, positions: int) -> float:
    """Forward FLOPs of the linear layers of one transformer layer, two for each multiplication and addition."""
    attention = sum(inputs * outputs for inputs, outputs, _ in attention_linears(config))
    mlp = config.ffn_hidden_size * (3 if config.gated else 2)
    return 2 * positions * (attention + config.hidden_size * mlp)


def attention_linears(config: ModelConfig, tensor: int = 1) -> list[tuple[int, int, bool]]:
    """Inputs and outputs of each linear layer of attention, and true if tensor parallelism splits it, the last by its
    inputs. Key and value heads count as often as `tensor` ranks hold them."""
    h, heads, d = config.hidden_size, config.num_attention_heads, config.kv_channels
    output = (heads * config.value_channels, h, True)
    if not config.multi_latent_attention:
        return [(h, (heads + 2 * config.kv_heads_per_rank(tensor) * tensor) * d, True), output]
    q, kv = config.q_lora_rank, config.kv_lora_rank
    queries = [(h, heads * d, True)] if q is None else [(h, q, False), (q, heads * d, True)]
    keys_values = heads * (config.qk_head_dim + config.v_head_dim)
    return [*queries, (h, kv + config.qk_pos_emb_head_dim, False), (kv, keys_values, True), output]


def attention_flops(config: ModelConfig, *, pairs: float) -> float:
    """Forward FLOPs of one layer's scores and weighted sums of values, for a number of query-key pairs."""
    return 2 * pairs * config.num_attention_heads * (config.kv_channels + config.value_channels)


def vocabulary_flops(config: ModelConfig, padded_vocab_size: int, positions: int) -> float:
    """Forward FLOPs of the projection of positions to the vocabulary."""
    return 2 * positions * config.hidden_size * padded_vocab_size
