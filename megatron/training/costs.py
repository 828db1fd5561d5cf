"""How much arithmetic a model needs."""

from __future__ import annotations

from megatron.model.config import ModelConfig


def flops_per_sample(config: ModelConfig, *, seq_length: int, padded_vocab_size: int) -> float:
    """Floating-point operations of forward and backward for one sequence, nothing recomputed.

    Counts the matrix products alone, attention over the full square, as arXiv 2104.04473 does in section 5.1:
    for GPT-2's shape this is 72 s L h² (1 + s / 6h + V / 12 L h).
    """
    h, heads = config.hidden_size, config.num_attention_heads * config.kv_channels
    keys_and_values = 2 * config.num_query_groups * config.kv_channels
    mlp = (3 if config.swiglu else 2) * h * config.ffn_hidden_size
    weights = config.num_layers * (h * (heads + keys_and_values) + heads * h + mlp) + h * padded_vocab_size
    attention = config.num_layers * 2 * seq_length * seq_length * heads
    # Two operations a multiplication and addition; backward does twice what forward does.
    return 3 * 2 * (seq_length * weights + attention)
