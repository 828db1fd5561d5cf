"""Texts that grow side by side. One joins when there is room, between two tokens of the others."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron.inference.predictor import Predictor, check_prompt
from megatron.inference.sampling import Choice, SamplingConfig, choose
from megatron.inference.text import TextStream
from megatron.tokenizer import Tokenizer

# Tokens of prompts that are read at once, while the other texts wait.
READ_AT_ONCE = 2048


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be continued, and how.

    Attributes:
        prompt: its tokens, at least one.
        stops: strings that end the text, and are not part of it.
        alternatives: how many of the most probable tokens to tell at each place, with their log-probabilities and
            that of the token itself; None tells none of this.
        scores_prompt: tell the same of the prompt's tokens.
    """

    prompt: Sequence[int]
    sampling: SamplingConfig
    stops: Sequence[str] = ()
    alternatives: int | None = None
    scores_prompt: bool = False


@dataclasses.dataclass(frozen=True)
class Score:
    """Of a token at its place: its log-probability, natural, before temperature and the like; and the most probable
    tokens there with theirs."""

    logprob: float
    alternatives: list[tuple[int, float]]


class Growth:
    """A request on its way.

    Attributes:
        new: the tokens that follow on the prompt.
        scores: of these, if asked for.
        prompt_scores: of the prompt's tokens but the first, if asked for, once the prompt has been read.
        reason: why it ended: "stop", or "length"; None while it grows.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer, longest: int) -> None:
        self.request = request
        self.tokens, self.new = list(request.prompt), []
        self.scores: list[Score] = []
        self.prompt_scores: list[Score] = []
        self.reason: str | None = None
        self.end = min(longest, len(self.tokens) + request.sampling.out_seq_length)
        # On the CPU, so that a seed gives the same text on every device.
        generator = torch.Generator().manual_seed(request.sampling.seed)
        self.choice = Choice(request.sampling, self.tokens, generator)
        self.text = TextStream(tokenizer, request.prompt, request.stops)

    def add(self, token: int, eod: int | None) -> str:
        """Take the next token, and give the text that is certain with it."""
        if token == eod:
            self.reason = "stop"
            return self.text.finish()
        self.tokens.append(token)
        self.new.append(token)
        text, full = self.text.add(token), len(self.tokens) == self.end
        if full:
            text += self.text.finish()
        if self.text.stopped:
            self.reason = "stop"
        elif full:
            self.reason = "length"
        return text


class Batcher:
    """Lets requests grow side by side. Those beyond the predictor's rows wait for their turn."""

    def __init__(self, predictor: Predictor, tokenizer: Tokenizer) -> None:
        self.predictor, self.tokenizer = predictor, tokenizer
        self.eod = tokenizer.special_ids.get("eod")
        self.waiting: collections.deque[Growth] = collections.deque()
        # In the order of their rows in the cache.
        self.growing: list[Growth] = []

    def add(self, request: Request) -> Growth:
        """Take a request on.

        Raises:
            InputError: its prompt is empty, or leaves no room for a token.
        """
        check_prompt(request.prompt, self.predictor.length)
        growth = Growth(request, self.tokenizer, self.predictor.length)
        self.waiting.append(growth)
        return growth

    def cancel(self, growth: Growth) -> None:
        """Forget a request."""
        if growth in self.waiting:
            self.waiting.remove(growth)
        elif growth in self.growing:
            self._leave(growth)

    def step(self) -> list[tuple[Growth, str]]:
        """Read the prompts of those who wait, as far as there is room, and let all others grow by a token. Gives who
        has grown or ended, and its new text."""
        older = len(self.growing)
        grown = []
        if newer := self._admit():
            starts, prompts = [0] * len(newer), [growth.request.prompt for growth in newer]
            every = newer[0].request.scores_prompt
            logits = self.predictor.forward(older, starts, prompts, every=every)
            if every:
                growth = newer[0]
                following = torch.tensor(growth.request.prompt[1:])
                growth.prompt_scores = _scores(logits[:-1], following, growth.request.alternatives or 0)
                logits = logits[-1:]
            grown += zip(newer, self._choose(newer, logits), strict=True)
        if older:
            growing = self.growing[:older]
            starts = [len(growth.tokens) - 1 for growth in growing]
            logits = self.predictor.forward(0, starts, [growth.tokens[-1:] for growth in growing])
            grown += zip(growing, self._choose(growing, logits), strict=True)
        for growth, _ in grown:
            if growth.reason is not None:
                self._leave(growth)
        return grown

    def _admit(self) -> list[Growth]:
        """Give rows to the next of those who wait. Prompts that are read at once are padded to the longest; one whose
        scores are asked for is read alone."""
        newer: list[Growth] = []
        while self.waiting and len(self.growing) < self.predictor.rows:
            lengths = [len(growth.tokens) for growth in (*newer, self.waiting[0])]
            alone = self.waiting[0].request.scores_prompt or (newer and newer[0].request.scores_prompt)
            if newer and (alone or max(lengths) * len(lengths) > READ_AT_ONCE):
                break
            newer.append(self.waiting.popleft())
            self.growing.append(newer[-1])
        return newer

    def _choose(self, growths: Sequence[Growth], logits_nv: Tensor) -> list[str]:
        """Let texts grow by the tokens that follow from their logits; gives the new text of each."""
        tokens = choose(logits_nv, [growth.choice for growth in growths])
        scored = [i for i, growth in enumerate(growths) if growth.request.alternatives is not None]
        for i in scored:
            token = torch.tensor(tokens[i : i + 1])
            growths[i].scores += _scores(logits_nv[i : i + 1], token, growths[i].request.alternatives)
        return [growth.add(token, self.eod) for growth, token in zip(growths, tokens, strict=True)]

    def _leave(self, growth: Growth) -> None:
        """Free the row of a growth; the last one's moves there, so that those in use stay side by side."""
        row, last = self.growing.index(growth), self.growing.pop()
        if last is not growth:
            self.growing[row] = last
            self.predictor.copy([len(self.growing)], [row], len(last.tokens))


def _scores(logits_nv: Tensor, tokens_n: Tensor, alternatives: int) -> list[Score]:
    logprobs_nv = logits_nv.log_softmax(-1)
    own = logprobs_nv.gather(1, tokens_n.unsqueeze(1)).squeeze(1).tolist()
    best = logprobs_nv.topk(min(alternatives, logprobs_nv.shape[1]))
    pairs = zip(own, best.indices.tolist(), best.values.tolist(), strict=True)
    return [Score(logprob, list(zip(ids, values, strict=True))) for logprob, ids, values in pairs]


def generate(
    batcher: Batcher, requests: Sequence[Request], advance: Callable[[int], object] = lambda number: None
) -> list[str]:
    """The texts that follow on requests.

    Args:
        advance: called with the number of a request that has ended.
    """
    growths = {batcher.add(request): number for number, request in enumerate(requests)}
    texts = [""] * len(requests)
    while batcher.waiting or batcher.growing:
        for growth, text in batcher.step():
            texts[growths[growth]] += text
            if growth.reason is not None:
                advance(growths[growth])
    return texts
