"""Time, tokens and floating-point operations of a run's steps."""

from __future__ import annotations

import collections
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron.model.config import ModelConfig
from megatron.model.context import ModelContext
from megatron.model.flops import exact_flops_per_sample, flops_per_sample
from megatron.parallel.collectives import all_reduce_sum
from megatron.parallel.mesh import Mesh


class WorkCounter:
    """Counts this replica's samples by shape, and what training on them takes."""

    def __init__(
        self, config: ModelConfig, context: ModelContext, *, causal: bool, layers_per_chunk: list[int]
    ) -> None:
        self.config, self.context = config, context
        self.causal, self.layers_per_chunk = causal, layers_per_chunk
        # Samples since the last `take`, by sequence length and positions that are projected to the vocabulary.
        self.samples: collections.Counter[tuple[int, int]] = collections.Counter()

    def add(self, samples: int, *, seq_length: int, num_logits: int) -> None:
        self.samples[seq_length, num_logits] += samples

    def take(self, mesh: Mesh) -> tuple[float, float, float]:
        """Work of all replicas since the last call. Every process must call it.

        Returns:
            tokens, including padding; floating-point operations by the paper's formula; and the exact number.
        """
        samples, self.samples = self.samples, collections.Counter()
        sums = torch.zeros(3, dtype=torch.float64)
        for (seq_length, num_logits), count in samples.items():
            shape = {
                "seq_length": seq_length,
                "padded_vocab_size": self.context.padded_vocab_size,
                "num_logits": num_logits,
            }
            flops = flops_per_sample(self.config, **shape)
            exact = exact_flops_per_sample(
                self.config,
                **shape,
                causal=self.causal,
                recompute=self.context.recompute,
                chunks=self.layers_per_chunk,
            )
            sums += count * torch.tensor([seq_length, flops, exact], dtype=torch.float64)
        tokens, flops, exact = all_reduce_sum(sums.to(mesh.device), mesh.dp).tolist()
        return tokens, flops, exact


class Clock:
    """Time and iterations of training since they were last taken."""

    def __init__(self) -> None:
        self.begin = time.perf_counter()
        self.iterations = 0

    def tick(self) -> None:
        """Count an iteration."""
        self.iterations += 1

    def take(self) -> tuple[float, int]:
        """Seconds and iterations since the last call."""
        now = time.perf_counter()
        taken = now - self.begin, self.iterations
        self.begin, self.iterations = now, 0
        return taken

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time of the block: evaluations and checkpoints are not training."""
        before = time.perf_counter()
        yield
        self.begin += time.perf_counter() - before
