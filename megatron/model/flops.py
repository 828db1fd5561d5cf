"""Floating-point operations of a model, from its sizes. Does not import torch, so that planning starts at once."""

from __future__ import annotations

from megatron.model.config import ModelConfig


def flops_per_sample(
    config: ModelConfig, *, seq_length: int, padded_vocab_size: int, num_logits: int
) -> float:
    """Model FLOPs of forward and backward for one sequence, without recomputation.

    Counts matrix products only, with attention over the full square, as arXiv 2104.04473 section 5.1 does: for GPT-2
    this is 72 s L h² (1 + s / 6h + V / 12 L h). In a mixture of experts each token passes --moe-router-topk experts.

    Args:
        num_logits: positions of the sequence that are projected to the vocabulary.
    """
    attention = attention_flops(config, pairs=sum(attended_pairs(config, seq_length, causal=False)))
    layers = sum(
        layer_flops(config, seq_length, has_experts=has_experts) for has_experts in config.all_expert_layers
    )
    layers += joining_flops(config, seq_length)
    # Backward takes twice the products of forward.
    return 3 * (layers + attention + vocabulary_flops(config, padded_vocab_size, num_logits))


def layer_flops(config: ModelConfig, positions: int, *, has_experts: bool) -> float:
    """Forward FLOPs of the linear layers of one transformer layer, two for each multiplication and addition."""
    weights = sum(inputs * outputs for inputs, outputs, _ in attention_linears(config))
    if not has_experts:
        return 2 * positions * (weights + mlp_weights(config, config.ffn_hidden_size))
    return 2 * positions * weights + shared_flops(config, positions) + routed_flops(config, positions)


def routed_flops(config: ModelConfig, positions: int) -> float:
    """Forward FLOPs of the router of one layer, and of the experts that it chooses."""
    assert config.num_experts is not None and config.moe_ffn_hidden_size is not None
    chosen = config.moe_router_topk * mlp_weights(config, config.moe_ffn_hidden_size)
    return 2 * positions * (config.hidden_size * config.num_experts + chosen)


def shared_flops(config: ModelConfig, positions: int) -> float:
    """Forward FLOPs of the shared expert of one layer."""
    gate = config.hidden_size if config.moe_shared_expert_gate else 0
    return 2 * positions * (mlp_weights(config, config.moe_shared_expert_intermediate_size or 0) + gate)


def mlp_weights(config: ModelConfig, ffn_hidden_size: int) -> int:
    """Number of weights of an MLP of this hidden size, without biases."""
    return config.hidden_size * ffn_hidden_size * (3 if config.gated else 2)


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


def attended_pairs(config: ModelConfig, s: int, *, causal: bool) -> list[float]:
    """Query-key pairs in each of `num_all_layers`; without `causal` each query counts as many as the last one has."""
    windows = (*config.windows, *[None] * config.mtp_num_layers)
    keys = [s if window is None else min(window + 1, s) for window in windows]
    return [k * s - (k * (k - 1) / 2 if causal else 0) for k in keys]


def attention_flops(config: ModelConfig, *, pairs: float) -> float:
    """Forward FLOPs of one layer's scores and weighted sums of values, for a number of query-key pairs."""
    return 2 * pairs * config.num_attention_heads * (config.kv_channels + config.value_channels)


def vocabulary_flops(config: ModelConfig, padded_vocab_size: int, positions: int) -> float:
    """Forward FLOPs of the projection of positions to the vocabulary, once for each token that they predict."""
    return 2 * positions * config.hidden_size * padded_vocab_size * (1 + config.mtp_num_layers)


def joining_flops(config: ModelConfig, positions: int) -> float:
    """Forward FLOPs of the projections that join hidden states and embeddings in multi-token prediction."""
    return 2 * positions * config.mtp_num_layers * 2 * config.hidden_size**2
