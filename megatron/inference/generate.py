"""Text from a trained model: one token at a time, each from the model's distribution over the next."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from megatron.flags import Config, InputError, flag
from megatron.model.gpt import GPTModel
from megatron.model.transformer import KVCache
from megatron.parallel.mesh import ALONE
from megatron.tokenizer import Tokenizer


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
    return (token for _, token in generate_batch(model, [prompt], config, eod, seeds=[config.seed]))


@torch.inference_mode()
def generate_batch(
    model: GPTModel,
    prompts: Sequence[list[int]],
    config: SamplingConfig,
    eod: int | None,
    *,
    seeds: Sequence[int],
    is_complete: Callable[[list[int]], bool] = lambda tokens: False,
) -> Iterator[tuple[int, int]]:
    """Yield (index of the prompt, next token) for several prompts that grow side by side, one position at a time.

    A prompt grows until `eod`, which is not yielded, `config.out_seq_length`, the end of the context, or the token
    with which `is_complete` holds for its new tokens.

    All rows stand at the same position, so none needs padding in front: the shortest prompt is read at once, and the
    rest of the longer ones token by token, in place of new tokens. Prompts of similar length go together best.

    Args:
        prompts: each of at least one token, and shorter than the context.
        seeds: of each prompt, in place of `config.seed`, so that what is drawn for one depends on no other.
    """
    context = model.config.max_position_embeddings
    weight = model.embedding.word_embeddings.weight
    rows = [list(prompt) for prompt in prompts]
    ends = [min(context, len(prompt) + config.out_seq_length) for prompt in prompts]
    layers = range(model.config.num_layers)
    settings = {"rows": len(rows), "length": max(ends), "dtype": weight.dtype, "device": weight.device}
    cache, position = KVCache(model.config, layers, ALONE, **settings), 0
    # On the CPU, so that a seed gives the same text on every device.
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    model.eval()
    growing = set(range(len(rows)))
    step = [row[: min(map(len, rows))] for row in rows]
    while growing:
        view = cache.rows(0, [position] * len(rows), len(step[0]))
        logits_bsv = model(torch.tensor(step, device=weight.device), view.position_ids_bs, cache=view)
        position += len(step[0])
        # Padding of the vocabulary is no token, even where the softmax of training included it.
        logits_bv = logits_bsv[:, -1, : model.vocab_size].float().cpu()
        for i in sorted(growing):
            row = rows[i]
            if len(row) > position:  # its prompt goes on
                continue
            token = choose(logits_bv[i], config, generators[i])
            if token == eod:
                growing.remove(i)
                continue
            yield i, token
            row.append(token)
            if len(row) == ends[i] or is_complete(row[len(prompts[i]) :]):
                growing.remove(i)
        # Rows that have ended are fed anything.
        step = [row[position : position + 1] or [0] for row in rows]


def generate_texts(
    model: GPTModel,
    tokenizer: Tokenizer,
    prompts: Sequence[list[int]],
    config: SamplingConfig,
    *,
    until: Sequence[str],
    batch_size: int,
    advance: Callable[[int], object],
) -> list[str]:
    """The text that follows on each prompt, up to the first of the strings `until`, which is not part of it; special
    tokens are left out.

    Prompts are taken in batches of similar length, the longest first. They lose their beginning where they leave no
    room for `config.out_seq_length` tokens. What is drawn for a prompt depends on `config.seed` and its place among
    the prompts, not on the batch it is in.

    Args:
        prompts: of at least one token each.
        config: its `out_seq_length` is less than the model's context.
        advance: called after each batch with the number of prompts that it held.
    """
    room = model.config.max_position_embeddings - config.out_seq_length
    assert room > 0

    special = set(tokenizer.special_ids.values())

    def text_of(tokens: list[int]) -> str:
        return tokenizer.detokenize([token for token in tokens if token not in special])

    def is_complete(tokens: list[int]) -> bool:
        text = text_of(tokens)
        return any(stop in text for stop in until)

    texts: dict[int, str] = {}
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]), reverse=True)
    for begin in range(0, len(order), batch_size):
        batch = order[begin : begin + batch_size]
        grown: dict[int, list[int]] = {i: [] for i in batch}
        steps = generate_batch(
            model,
            [prompts[i][-room:] for i in batch],
            config,
            tokenizer.special_ids.get("eod"),
            seeds=[config.seed + i for i in batch],
            is_complete=is_complete,
        )
        for row, token in steps:
            grown[batch[row]].append(token)
        for i, tokens in grown.items():
            texts[i] = text_of(tokens)
            for stop in until:
                texts[i] = texts[i].split(stop)[0]
        advance(len(batch))
    return [texts[i] for i in range(len(prompts))]


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
