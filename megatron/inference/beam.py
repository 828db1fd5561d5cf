"""Beam search: find the most probable sequence rather than the most probable next token."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Collection, Sequence

from megatron.errors import InputError
from megatron.flags import Config, flag
from megatron.inference.predictor import NonFiniteLogits, Predictor, check_prompt


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeamConfig(Config):
    """Flags of beam search, which replaces sampling."""

    beam_width: int | None = flag(None, "beam search with this many beams (default: sampling)", low=1)
    length_penalty: float = flag(
        1.0, "a beam's score is its log-probability divided by its length to this power", low=0
    )

    def check(self, given: Collection[str]) -> None:
        """Raise `InputError` if sampling flags were `given` (field names), which beam search ignores."""
        if self.beam_width is not None and given:
            raise InputError(
                f"--{min(given).replace('_', '-')} has no effect with --beam-width; leave out one of the two"
            )
        if self.beam_width is None and self.length_penalty != 1:
            raise InputError("--length-penalty needs --beam-width")


@dataclasses.dataclass(frozen=True, order=True)
class Hypothesis:
    """A finished beam: its score, and the tokens after the prompt."""

    score: float
    tokens: tuple[int, ...]


def beam_search(
    predictor: Predictor,
    prompt: Sequence[int],
    config: BeamConfig,
    *,
    length: int,
    ends: Collection[int],
    check: Callable[[], None] = lambda: None,
) -> list[Hypothesis]:
    """Return the `config.beam_width` best continuations of at most `length` tokens, the best first.

    The predictor needs a row for each beam. A beam ends at a token of `ends`, which counts for its length but is not
    among its tokens. The search ends when that many beams have ended and no open beam scores better than the worst of
    them.

    Args:
        check: called before each forward pass; may raise to cancel the search.

    Raises:
        InputError: the prompt is empty, or leaves no room for a token.
        NonFiniteLogits: the model computed NaN or infinity.
    """
    width = config.beam_width
    assert width is not None
    check_prompt(prompt, predictor.length)
    length = min(length, predictor.length - len(prompt))
    ended: list[Hypothesis] = []
    beams: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    check()
    logits_nv = predictor.forward(0, [0], [prompt])
    for count in range(1, length + 1):
        # Enough candidates to keep `width` beams open, even if all of them can end.
        if not logits_nv.sum().isfinite():
            for row in range(len(beams)):
                predictor.clear(row)
            raise NonFiniteLogits
        logprobs_nv = logits_nv.log_softmax(-1).double()
        for i, (score, _) in enumerate(beams):
            logprobs_nv[i] += score
        best = logprobs_nv.flatten().topk(min((1 + len(ends)) * width, logprobs_nv.numel()))
        candidates = [
            (score, *divmod(index, predictor.vocab_size))
            for score, index in zip(best.values.tolist(), best.indices.tolist(), strict=True)
        ]
        for score, beam, token in candidates[:width]:
            if token in ends:
                heapq.heappush(ended, Hypothesis(score / count**config.length_penalty, beams[beam][1]))
        while len(ended) > width:
            heapq.heappop(ended)
        kept = [candidate for candidate in candidates if candidate[2] not in ends][:width]
        sources = [beam for _, beam, _ in kept]
        beams = [(score, (*beams[beam][1], token)) for score, beam, token in kept]
        if len(ended) == width and ended[0].score >= beams[0][0] / count**config.length_penalty:
            return sorted(ended, reverse=True)
        if count < length:
            position = len(prompt) + count - 1
            if sources != list(range(len(sources))):
                predictor.copy(sources, range(len(sources)), position)
            check()
            logits_nv = predictor.forward(0, [position] * len(beams), [tokens[-1:] for _, tokens in beams])
    ended += [Hypothesis(score / length**config.length_penalty, tokens) for score, tokens in beams]
    return sorted(ended, reverse=True)[:width]
