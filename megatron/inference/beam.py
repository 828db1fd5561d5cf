"""Beam search: the most probable whole text, rather than the most probable next token."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Collection, Sequence

from megatron.flags import Config, InputError, flag
from megatron.inference.predictor import Predictor, check_prompt


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeamConfig(Config):
    """Beam search, in place of sampling."""

    beam_width: int | None = flag(
        None, "keep so many of the most probable texts (default: none; tokens are drawn one by one)", low=1
    )
    length_penalty: float = flag(
        1.0, "the score of a text is its log-probability over its length to this power", low=0
    )

    def check(self, given: Collection[str]) -> None:
        """Raise `InputError` if flags were `given`, by field, that beam search has no use for."""
        if self.beam_width is not None and given:
            raise InputError(
                f"--{min(given).replace('_', '-')} has no effect with --beam-width; leave one of the two out"
            )
        if self.beam_width is None and self.length_penalty != 1:
            raise InputError("--length-penalty needs --beam-width")


@dataclasses.dataclass(frozen=True, order=True)
class Hypothesis:
    """A text that has ended: its score, and the tokens after the prompt."""

    score: float
    tokens: tuple[int, ...]


def beam_search(
    predictor: Predictor, prompt: Sequence[int], config: BeamConfig, *, length: int, eod: int | None
) -> list[Hypothesis]:
    """The best `config.beam_width` texts of at most `length` tokens that follow on a prompt, the best first.

    The predictor has a row for each. A text ends at `eod`, which its length counts and its tokens do not hold. The
    search ends when so many have ended, and the best of those that grow scores no better than the worst of them.

    Raises:
        InputError: the prompt is empty, or leaves no room for a token.
    """
    width, eods = config.beam_width, 0 if eod is None else 1
    check_prompt(prompt, predictor.length)
    length = min(length, predictor.length - len(prompt))
    ended: list[Hypothesis] = []
    beams: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    logits_nv = predictor.forward(0, [0], [prompt])
    for count in range(1, length + 1):
        # Enough that `width` are left, however many of them end.
        logprobs_nv = logits_nv.log_softmax(-1).double()
        for i, (score, _) in enumerate(beams):
            logprobs_nv[i] += score
        best = logprobs_nv.flatten().topk(min((1 + eods) * width, logprobs_nv.numel()))
        candidates = [
            (score, *divmod(place, predictor.vocab_size))
            for score, place in zip(best.values.tolist(), best.indices.tolist(), strict=True)
        ]
        for score, beam, token in candidates[:width]:
            if token == eod:
                heapq.heappush(ended, Hypothesis(score / count**config.length_penalty, beams[beam][1]))
        while len(ended) > width:
            heapq.heappop(ended)
        going = [candidate for candidate in candidates if candidate[2] != eod][:width]
        sources = [beam for _, beam, _ in going]
        beams = [(score, (*beams[beam][1], token)) for score, beam, token in going]
        if len(ended) == width and ended[0].score >= beams[0][0] / count**config.length_penalty:
            return sorted(ended, reverse=True)
        if count < length:
            position = len(prompt) + count - 1
            if sources != list(range(len(sources))):
                predictor.copy(sources, range(len(sources)), position)
            logits_nv = predictor.forward(0, [position] * len(beams), [tokens[-1:] for _, tokens in beams])
    ended += [Hypothesis(score / length**config.length_penalty, tokens) for score, tokens in beams]
    return sorted(ended, reverse=True)[:width]
