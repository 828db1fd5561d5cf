"""How the next token is chosen."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.flags import Config, flag


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingConfig(Config):
    """How the next token is chosen, and how many."""

    out_seq_length: int = flag(128, "tokens to generate at most", low=1, aliases=("--max-new-tokens",))
    greedy: bool = flag(False, "always take the most probable token")
    temperature: float = flag(
        1.0, "divides the logits: below 1 the text is more predictable, above 1 more varied", low=1e-6
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
    repetition_penalty: float = flag(
        1.0,
        "divides the logits of tokens that the text has already (of negative ones: multiplies)",
        low=1e-6,
        high=1e6,
    )
    seed: int = flag(1234, "seed of the choices", low=0, high=2**32 - 1)


@dataclasses.dataclass
class Choice:
    """What the next token of one text is chosen by: the settings, the text's tokens so far, and its random numbers,
    which are its own, so that what is drawn for it depends on no other text and on no layout."""

    config: SamplingConfig
    tokens: Sequence[int]
    generator: torch.Generator


def choose(logits_nv: Tensor, choices: Sequence[Choice]) -> list[int]:
    """The next token of each text: the most probable one, or drawn after repetition penalty, temperature, top-k and
    top-p, in this order."""
    penalized = [i for i, choice in enumerate(choices) if choice.config.repetition_penalty != 1]
    if penalized:
        logits_nv = logits_nv.clone()  # which others read too
    for i in penalized:
        penalty, seen = choices[i].config.repetition_penalty, torch.tensor(list(set(choices[i].tokens)))
        values = logits_nv[i, seen]
        logits_nv[i, seen] = torch.where(values > 0, values / penalty, values * penalty)
    tokens = logits_nv.argmax(-1).tolist()
    drawn = [i for i, choice in enumerate(choices) if not choice.config.greedy]
    if drawn:
        found = _draw(logits_nv[drawn], [choices[i] for i in drawn])
        for i, token in zip(drawn, found, strict=True):
            tokens[i] = token
    return tokens


def _draw(logits_nv: Tensor, choices: Sequence[Choice]) -> list[int]:
    configs = [choice.config for choice in choices]
    x_nv = logits_nv / torch.tensor([[config.temperature] for config in configs])
    if any(config.top_k for config in configs):
        x_nv = x_nv.masked_fill(x_nv < _least_of_top_k(x_nv, [config.top_k for config in configs]), -math.inf)
    if any(0 < config.top_p < 1 for config in configs):
        # Of equal ones those with the smaller ids come first: rounded logits often are.
        falling, ids = x_nv.softmax(-1).sort(dim=-1, descending=True, stable=True)
        before = falling.cumsum(-1) - falling
        # A token goes if those before it reach top_p; the first stays.
        goes = before >= torch.tensor([[config.top_p % 1 or math.inf] for config in configs])
        goes[:, 0] = False
        x_nv = x_nv.masked_fill(torch.zeros_like(goes).scatter(-1, ids, goes), -math.inf)
    below_nv = x_nv.softmax(-1, dtype=torch.float64).cumsum(-1)
    at_n1 = torch.stack(
        [torch.rand(1, dtype=torch.float64, generator=choice.generator) for choice in choices]
    )
    return torch.searchsorted(below_nv, at_n1 * below_nv[:, -1:], right=True).squeeze(1).tolist()


def _least_of_top_k(x_nv: Tensor, top_k: list[int]) -> Tensor:
    """[n, 1]: the smallest logit that stays; of those with `top_k` 0 all do."""
    vocabulary = x_nv.shape[1]
    falling = x_nv.topk(min(max(top_k), vocabulary)).values
    last = torch.tensor([[min(k, vocabulary) - 1] for k in top_k])
    return falling.gather(1, last.clamp(min=0)).masked_fill(last < 0, -math.inf)
