"""Text from a trained model: one token at a time, each from the model's distribution over the next."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from megatron.flags import Config, InputError, flag
from megatron.model.gpt import GPTModel, position_ids
from megatron.model.transformer import KVCache


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingConfig(Config):
    """How the next token is chosen, and how many."""

    out_seq_length: int = flag(128, "tokens to generate at most", low=1, aliases=("--max-new-tokens",))
    greedy: bool = flag(False, "always take the most probable token")
    temperature: float = flag(
        1.0, "divides the logits: below 1 the text is more predictable, above 1 more varied", above=0
    )
    top_k: int = flag(
        0, "choose among this many most probable tokens; 0 among all", low=0, aliases=("--top_k",)
    )
    top_p: float = flag(
        0.0,
        "choose among the most probable tokens that together have this probability; 0 among all",
        low=0,
        high=1,
        aliases=("--top_p",),
    )
    seed: int = flag(1234, "seed of the choices", low=0, high=2**32 - 1)


@torch.inference_mode()
def generate(model: GPTModel, prompt: list[int], config: SamplingConfig, eod: int | None) -> Iterator[int]:
    """Yield the tokens that follow on `prompt`, until `eod`, `config.out_seq_length` or the end of the context.

    Raises:
        InputError: the prompt is empty, or fills the context.
    """
    context = model.config.max_position_embeddings
    if not prompt:
        raise InputError("--prompt: is empty; give at least one token to begin with")
    if len(prompt) >= context:
        raise InputError(f"--prompt: has {len(prompt)} tokens, but the model sees {context}; shorten it")
    weight = model.embedding.word_embeddings.weight
    length = min(context, len(prompt) + config.out_seq_length)
    cache = KVCache(model.config, batch=1, length=length, dtype=weight.dtype, device=weight.device)
    # On the CPU, so that a seed gives the same text on every device.
    generator = torch.Generator().manual_seed(config.seed)
    model.eval()
    tokens = prompt
    for _ in range(length - len(prompt)):
        step = torch.tensor([tokens], device=weight.device)
        logits_bsv = model(step, position_ids(cache.position, 1, len(tokens), weight.device), cache=cache)
        # Padding of the vocabulary is no token, even where the softmax of training included it.
        token = choose(logits_bsv[0, -1, : model.vocab_size].float().cpu(), config, generator)
        if token == eod:
            return
        yield token
        tokens = [token]


def choose(logits_v: Tensor, config: SamplingConfig, generator: torch.Generator) -> int:
    """The next token: the most probable one, or drawn after temperature, top-k and top-p, in this order."""
    if config.greedy:
        return int(logits_v.argmax())
    logits, ids = ((logits_v - logits_v.max()) / config.temperature).sort(descending=True, stable=True)
    if config.top_k:
        logits = logits[: config.top_k]
    probabilities = logits.softmax(0)
    if config.top_p:
        # A token stays if those before it do not reach top_p yet; the first always stays.
        before = probabilities.cumsum(0) - probabilities
        probabilities[1:][before[1:] >= config.top_p] = 0.0
    return int(ids[torch.multinomial(probabilities, 1, generator=generator)])
