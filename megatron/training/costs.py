"""What a model costs: parameters, arithmetic, memory."""

from __future__ import annotations

import os

import torch

from megatron.flags import InputError
from megatron.model.config import ModelConfig


def parameter_count(config: ModelConfig, padded_vocab_size: int) -> int:
    """Parameters of a GPT. For GPT-2's shape with the vocabulary V, equation 2 of arXiv 2104.04473:
    12 L h² (1 + 13 / 12h + (V + s) / 12 L h), and the final norm's 2 h, which the paper leaves out."""
    h = config.hidden_size
    biases = 1 if config.add_bias_linear else 0
    norm = h * (2 if config.normalization == "LayerNorm" else 1)
    outputs = _qkv_width(config) + _mlp_inputs(config) + 2 * h
    layer = _layer_weights(config) + biases * outputs + 2 * norm
    tables = padded_vocab_size * (2 if config.untie_embeddings_and_output_weights else 1)
    if config.position_embedding_type == "learned_absolute":
        tables += config.max_position_embeddings
    return config.num_layers * layer + norm + tables * h


def flops_per_sample(config: ModelConfig, *, seq_length: int, padded_vocab_size: int) -> float:
    """Floating-point operations of forward and backward for one sequence, nothing recomputed.

    Counts the matrix products alone, attention over the full square, as arXiv 2104.04473 does in its section
    5.1: for GPT-2's shape this is 72 s L h² (1 + s / 6h + V / 12 L h).
    """
    weights = config.num_layers * _layer_weights(config) + config.hidden_size * padded_vocab_size
    heads = config.num_attention_heads * config.kv_channels
    attention = config.num_layers * 2 * seq_length * seq_length * heads
    # Two operations a multiplication and addition; backward does twice what forward does.
    return 3 * 2 * (seq_length * weights + attention)


def check_memory(parameters: int, *, bf16: bool, device: torch.device) -> None:
    """Refuse a model whose weights, gradients and optimizer state alone are more than the device holds.

    Raises:
        InputError: with both numbers.
    """
    # fp32: weights, gradients, two moments. bf16: weights of 2 bytes, and the same with fp32 masters.
    needed = parameters * (18 if bf16 else 16)
    if device.type == "cuda":
        available = torch.cuda.get_device_properties(device).total_memory
    else:
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > available:
        raise InputError(
            f"a model of {parameters:,} parameters needs {needed / 1e9:,.1f} GB for weights, gradients and Adam's "
            f"moments, but {device} has {available / 1e9:,.1f} GB; lower --num-layers or --hidden-size"
        )


def _qkv_width(config: ModelConfig) -> int:
    return (config.num_attention_heads + 2 * config.num_query_groups) * config.kv_channels


def _mlp_inputs(config: ModelConfig) -> int:
    return config.ffn_hidden_size * (2 if config.swiglu else 1)


def _layer_weights(config: ModelConfig) -> int:
    """Elements of the matrices of one layer."""
    heads = config.num_attention_heads * config.kv_channels
    return config.hidden_size * (_qkv_width(config) + heads + _mlp_inputs(config) + config.ffn_hidden_size)
