"""Padding of texts."""

from __future__ import annotations

import math

from megatron.parallel.config import ParallelConfig


def length_multiple(config: ParallelConfig) -> int:
    """Length to a multiple of which texts are padded: 8 for the matrix kernels, and the parts that ranks have of s."""
    cp = config.context_parallel_size
    chunks = 2 * cp if cp > 1 else 1
    return math.lcm(8, chunks * (config.tensor_model_parallel_size if config.sequence_parallel else 1))
