"""How probable a model finds given continuations of given contexts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from megatron.evaluation.windows import spans
from megatron.model.gpt import GPTModel, position_ids

Pair = tuple[list[int], list[int]]  # the tokens of a context, and of what follows on it


@dataclasses.dataclass(frozen=True)
class Score:
    """Of a continuation: the natural logarithm of its probability, and whether each of its tokens is the most
    probable one."""

    logprob: float
    is_greedy: bool


def windows(tokens: list[int], prefix: int, length: int) -> Iterator[Pair]:
    """Cut a text into pairs that together hold each of its tokens once as a continuation.

    The first token follows on `prefix`. Each window predicts `length` tokens, after a context of one; the last
    predicts what is left, after as much context as `length` allows, so that no window is needlessly short.
    """
    stream = [prefix, *tokens]
    for begin, first, end in spans(len(tokens), length=length, stride=length, fill=True):
        yield stream[begin:first], stream[first:end]


@torch.inference_mode()
def score(
    model: GPTModel, pairs: Sequence[Pair], *, batch_size: int, advance: Callable[[int], object]
) -> list[Score]:
    """Score the continuation of each pair, in batches of texts of similar length, the longest first.

    Contexts lose their beginning where a pair is longer than the model's context. Pairs that differ in the last token
    alone, such as answers of one letter, are computed once.

    Args:
        pairs: of at least one token each; the continuation not longer than the model's context.
        advance: called after each batch with the number of pairs that it held.
    """
    longest = model.config.max_position_embeddings
    alike: dict[tuple[int, ...], list[int]] = {}
    for i, (context, continuation) in enumerate(pairs):
        assert context and 0 < len(continuation) <= longest
        # The last token is predicted, and so is no input.
        alike.setdefault(tuple((context + continuation)[-longest - 1 : -1]), []).append(i)
    inputs = sorted(alike, key=len, reverse=True)
    scores: dict[int, Score] = {}
    model.eval()
    for begin in range(0, len(inputs), batch_size):
        batch = inputs[begin : begin + batch_size]
        logits_bsv = _logits(model, batch)
        which = [(row, i) for row, tokens in enumerate(batch) for i in alike[tokens]]
        found = torch.stack([_score(logits_bsv[r, : len(batch[r])], pairs[i][1]) for r, i in which]).tolist()
        for (_, i), (logprob, is_greedy) in zip(which, found, strict=True):
            scores[i] = Score(logprob, bool(is_greedy))
        advance(len(which))
    return [scores[i] for i in range(len(pairs))]


def _logits(model: GPTModel, rows: Sequence[Sequence[int]]) -> Tensor:
    """Logits [b, s, v] of rows of tokens, s being the length of the longest; beyond the end of a row they mean
    nothing."""
    device = model.embedding.word_embeddings.weight.device
    length = max(map(len, rows))
    # No token sees those after it, so that any will do to fill the rows.
    tokens = torch.tensor([[*row, *[0] * (length - len(row))] for row in rows], device=device)
    # Padding of the vocabulary is no token, even where the softmax of training included it.
    return model(tokens, position_ids(0, len(rows), length, device))[..., : model.vocab_size]


def _score(logits_sv: Tensor, continuation: list[int]) -> Tensor:
    """[2]: log-probability of the last tokens of a text, and 1 if all are the most probable ones."""
    logprobs = logits_sv[-len(continuation) :].float().log_softmax(-1)
    targets = torch.tensor(continuation, device=logits_sv.device).unsqueeze(1)
    is_greedy = (logprobs.argmax(-1, keepdim=True) == targets).all()
    return torch.stack((logprobs.gather(1, targets).double().sum(), is_greedy.double()))
