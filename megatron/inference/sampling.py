"""Sampling of the next token."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.flags import Config, flag


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingConfig(Config):
    """Flags of sampling."""

    out_seq_length: int = flag(
        128, "maximum number of tokens to generate", low=1, aliases=("--max-new-tokens",)
    )
    greedy: bool = flag(False, "always take the most probable token")
    temperature: float = flag(
        1.0, "divides the logits: below 1 makes the text more predictable, above 1 more varied", low=1e-6
    )
    top_k: int = flag(
        0, "sample from this many most probable tokens; 0: from all", low=0, aliases=("--top_k",)
    )
    top_p: float = flag(
        0.0,
        "sample from the most probable tokens with this cumulative probability; 0: from all",
        low=0,
        high=1,
        aliases=("--top_p",),
    )
    repetition_penalty: float = flag(
        1.0,
        "divides positive logits of tokens that occur in the text, and multiplies negative ones",
        low=1e-6,
        high=1e6,
    )
    seed: int = flag(1234, "random seed", low=0, high=2**32 - 1)


@dataclasses.dataclass
class Sampler:
    """Sampling state of one sequence: its settings, its tokens so far, and its random generator.

    Each sequence has its own generator, so that its samples depend neither on other sequences nor on the layout.
    """

    config: SamplingConfig
    tokens: Sequence[int]
    generator: torch.Generator


def sample_tokens(logits_nv: Tensor, samplers: Sequence[Sampler]) -> list[int]:
    """Return the next token of each sequence: the most probable one if greedy, or a sample.

    Repetition penalty, temperature, top-k and top-p apply in this order.
    """
    penalized = [i for i, sampler in enumerate(samplers) if sampler.config.repetition_penalty != 1]
    if penalized:
        logits_nv = logits_nv.clone()  # callers read the original
    for i in penalized:
        penalty, seen = samplers[i].config.repetition_penalty, torch.tensor(list(set(samplers[i].tokens)))
        values = logits_nv[i, seen]
        logits_nv[i, seen] = torch.where(values > 0, values / penalty, values * penalty)
    tokens = logits_nv.argmax(-1).tolist()
    random = [i for i, sampler in enumerate(samplers) if not sampler.config.greedy]
    if random:
        samples = _sample(logits_nv[random], [samplers[i] for i in random])
        for i, token in zip(random, samples, strict=True):
            tokens[i] = token
    return tokens


def _sample(logits_nv: Tensor, samplers: Sequence[Sampler]) -> list[int]:
    configs = [sampler.config for sampler in samplers]
    x_nv = logits_nv / torch.tensor([[config.temperature] for config in configs])
    if any(config.top_k for config in configs):
        x_nv = x_nv.masked_fill(x_nv < _kth_largest(x_nv, [config.top_k for config in configs]), -math.inf)
    if any(0 < config.top_p < 1 for config in configs):
        # Ties, frequent among rounded logits, are sorted by token id.
        falling, ids = x_nv.softmax(-1).sort(dim=-1, descending=True, stable=True)
        before = falling.cumsum(-1) - falling
        # Remove a token if those before it reach top_p; always keep the first.
        removed = before >= torch.tensor([[config.top_p % 1 or math.inf] for config in configs])
        removed[:, 0] = False
        x_nv = x_nv.masked_fill(torch.zeros_like(removed).scatter(-1, ids, removed), -math.inf)
    cumulative_nv = x_nv.softmax(-1, dtype=torch.float64).cumsum(-1)
    uniform_n1 = torch.stack(
        [torch.rand(1, dtype=torch.float64, generator=sampler.generator) for sampler in samplers]
    )
    return (
        torch.searchsorted(cumulative_nv, uniform_n1 * cumulative_nv[:, -1:], right=True).squeeze(1).tolist()
    )


def _kth_largest(x_nv: Tensor, top_k: list[int]) -> Tensor:
    """Return [n, 1], the smallest logit to keep; -inf for rows with `top_k` 0."""
    vocab_size = x_nv.shape[1]
    falling = x_nv.topk(min(max(top_k), vocab_size)).values
    last = torch.tensor([[min(k, vocab_size) - 1] for k in top_k])
    return falling.gather(1, last.clamp(min=0)).masked_fill(last < 0, -math.inf)
