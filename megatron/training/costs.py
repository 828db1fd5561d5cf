"""What a model costs: arithmetic and memory."""

from __future__ import annotations

import os

import torch

from megatron.flags import InputError
from megatron.model.config import ModelConfig
from megatron.optim.config import OptimizerConfig
from megatron.optim.layout import Bucket
from megatron.optim.optimizer import MOMENTS


def flops_per_sample(
    config: ModelConfig, *, seq_length: int, padded_vocab_size: int, vocab_positions: int
) -> float:
    """Floating-point operations of forward and backward for one sequence, nothing recomputed.

    Counts the matrix products alone, attention over the full square, as arXiv 2104.04473 does in its section
    5.1: for GPT-2's shape this is 72 s L h² (1 + s / 6h + V / 12 L h).

    Args:
        vocab_positions: of the sequence's positions, those that are projected to the vocabulary.
    """
    layers = seq_length * config.num_layers * _layer_weights(config)
    vocabulary = vocab_positions * config.hidden_size * padded_vocab_size
    heads = config.num_attention_heads * config.kv_channels
    attention = config.num_layers * 2 * seq_length * seq_length * heads
    # Two operations a multiplication and addition; backward does twice what forward does.
    return 3 * 2 * (layers + vocabulary + attention)


def check_memory(buckets: list[Bucket], config: OptimizerConfig, *, half: bool, device: torch.device) -> None:
    """Refuse a model whose weights, gradients and optimizer state alone are more than the device holds; parameters take
    two bytes if `half`, else four.

    Raises:
        InputError: with both numbers.
    """
    size, owned = buckets[-1].end, sum(end - begin for begin, end in (b.owned for b in buckets))
    # Parameters and fp32 gradients; fp32 master weights where the parameters are not; the optimizer's means.
    moments = len(MOMENTS[config.optimizer]) * (2 if config.bf16_optimizer_states else 4)
    needed = size * ((2 if half else 4) + 4) + owned * (4 * half + moments)
    if device.type == "cuda":
        available = torch.cuda.get_device_properties(device).total_memory
    else:
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > available:
        raise InputError(
            f"{size:,} parameters on one process need {needed / 1e9:,.1f} GB for weights, gradients and the "
            f"state of {config.optimizer}, but {device} has {available / 1e9:,.1f} GB; lower --num-layers or "
            "--hidden-size, or divide the model (--tensor-model-parallel-size, --pipeline-model-parallel-size, "
            "--use-distributed-optimizer)"
        )


def _qkv_width(config: ModelConfig) -> int:
    return (config.num_attention_heads + 2 * config.num_query_groups) * config.kv_channels


def _mlp_inputs(config: ModelConfig) -> int:
    return config.ffn_hidden_size * (2 if config.swiglu else 1)


def _layer_weights(config: ModelConfig) -> int:
    """Elements of the matrices of one layer."""
    heads = config.num_attention_heads * config.kv_channels
    return config.hidden_size * (_qkv_width(config) + heads + _mlp_inputs(config) + config.ffn_hidden_size)
