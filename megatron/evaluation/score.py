"""Log-probabilities of continuations, given their contexts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from megatron.evaluation.windows import spans
from megatron.model.gpt import GPTModel

Pair = tuple[list[int], list[int]]  # tokens of a context, and of its continuation


@dataclasses.dataclass(frozen=True)
class Score:
    """Natural log-probability of a continuation, and whether greedy decoding would produce it."""

    logprob: float
    is_greedy: bool


def windows(tokens: list[int], prefix: int, length: int) -> Iterator[Pair]:
    """Cut a text into pairs whose continuations together are the text.

    The first token's context is `prefix`. Each window predicts `length` tokens after a context of one. The last window
    predicts the rest, with as much context as `length` allows.
    """
    stream = [prefix, *tokens]
    for begin, first, end in spans(len(tokens), length=length, stride=length, fill=True):
        yield stream[begin:first], stream[first:end]


@torch.inference_mode()
def score(
    model: GPTModel, pairs: Sequence[Pair], *, batch_size: int, advance: Callable[[int], object]
) -> list[Score]:
    """Score the continuation of each pair, in batches of similar length, the longest first.

    A pair longer than the model's context loses the beginning of its context. Pairs that differ only in the last token,
    such as one-letter answers, share a forward pass.

    Args:
        pairs: contexts and continuations of at least one token; continuations fit the model's context.
        advance: called after each batch with its number of pairs.
    """
    longest = model.config.max_position_embeddings
    by_input: dict[tuple[int, ...], list[int]] = {}
    for i, (context, continuation) in enumerate(pairs):
        assert context and 0 < len(continuation) <= longest
        # The last token is a target only.
        by_input.setdefault(tuple((context + continuation)[-longest - 1 : -1]), []).append(i)
    inputs = sorted(by_input, key=len, reverse=True)
    scores: dict[int, Score] = {}
    model.eval()
    for begin in range(0, len(inputs), batch_size):
        batch = inputs[begin : begin + batch_size]
        logits_bsv = _logits(model, batch)
        targets = [(row, i) for row, tokens in enumerate(batch) for i in by_input[tokens]]
        values = torch.stack(
            [_score(logits_bsv[r, : len(batch[r])], pairs[i][1]) for r, i in targets]
        ).tolist()
        for (_, i), (logprob, is_greedy) in zip(targets, values, strict=True):
            scores[i] = Score(logprob, bool(is_greedy))
        advance(len(targets))
    return [scores[i] for i in range(len(pairs))]


def _logits(model: GPTModel, rows: Sequence[Sequence[int]]) -> Tensor:
    """Return the logits [b, s, v] of rows of tokens, with s the length of the longest; past a row's end undefined."""
    device = next(model.parameters()).device
    length = max(map(len, rows))
    # Attention is causal, so the padding does not matter.
    tokens = torch.tensor([[*row, *[0] * (length - len(row))] for row in rows], device=device)
    # Vocabulary padding is never a candidate, even if the softmax of training included it.
    return model(tokens, torch.arange(length, device=device).expand(len(rows), length))[
        ..., : model.context.vocab_size
    ]


def _score(logits_sv: Tensor, continuation: list[int]) -> Tensor:
    """Return [2]: the log-probability of a text's last tokens, and 1 if each is the most probable one."""
    logprobs = logits_sv[-len(continuation) :].float().log_softmax(-1)
    targets = torch.tensor(continuation, device=logits_sv.device).unsqueeze(1)
    is_greedy = (logprobs.argmax(-1, keepdim=True) == targets).all()
    return torch.stack((logprobs.gather(1, targets).double().sum(), is_greedy.double()))
