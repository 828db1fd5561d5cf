"""Continuous batching: sequences are generated together, and new ones join between two tokens of the others."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from megatron.inference.predictor import NonFiniteLogits, Predictor, check_prompt
from megatron.inference.sampling import Sampler, SamplingConfig, sample_tokens
from megatron.inference.text import TextStream, end_tokens
from megatron.tokenizer import Tokenizer

# Prompt tokens of one prefill, during which the other sequences wait.
MAX_PREFILL_TOKENS = 2048
# Prompt tokens whose logits are in memory at once if their log-probabilities are requested: 256 MiB in fp32 for a
# vocabulary of 128K.
MAX_SCORED_TOKENS = 512


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt, and the settings of its continuation.

    Attributes:
        prompt: its tokens, at least one.
        stops: strings that end the text and are not part of it.
        top_logprobs: return the log-probability of each token, and of this many most probable tokens in its place;
            None returns none.
        prompt_logprobs: return these for the prompt's tokens too.
    """

    prompt: Sequence[int]
    sampling: SamplingConfig
    stops: Sequence[str] = ()
    top_logprobs: int | None = None
    prompt_logprobs: bool = False


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """Natural log-probability of a token, before temperature and penalties, and the most probable tokens there."""

    logprob: float
    top: list[tuple[int, float]]


class SequenceState:
    """A request being generated.

    Attributes:
        new: generated tokens.
        end_token: the token that ended the sequence (`end_tokens`), which is not in `new`; None before.
        logprobs: of the generated tokens and `end_token`, if requested.
        prompt_logprobs: of the prompt's tokens except the first, if requested, once the prompt has been processed.
        reason: why generation ended: "stop", "length", or "error" if the logits were not finite; None before.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer, max_length: int) -> None:
        self.request = request
        self.tokens, self.new = list(request.prompt), list[int]()
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] = []
        self.reason: str | None = None
        self.end_token: int | None = None
        self.end = min(max_length, len(self.tokens) + request.sampling.out_seq_length)
        # On the CPU, so that a seed gives the same text on every device.
        generator = torch.Generator().manual_seed(request.sampling.seed)
        self.sampler = Sampler(request.sampling, self.tokens, generator)
        self.text = TextStream(tokenizer, request.prompt, request.stops)

    def add(self, token: int, ends: Collection[int]) -> str:
        """Append the next token, unless it is one of `ends`, and return the text that is final with it."""
        if token in ends:
            self.reason, self.end_token = "stop", token
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


def check_finite(sequence: SequenceState) -> None:
    """Raise `NonFiniteLogits` if a sequence ended because its logits were not finite."""
    if sequence.reason == "error":
        raise NonFiniteLogits


class Batcher:
    """Generate for several requests together. Requests beyond the predictor's rows wait."""

    def __init__(self, predictor: Predictor, tokenizer: Tokenizer) -> None:
        self.predictor, self.tokenizer = predictor, tokenizer
        self.ends = end_tokens(tokenizer)
        self.waiting: collections.deque[SequenceState] = collections.deque()
        # In the order of their rows in the cache.
        self.running: list[SequenceState] = []

    def add(self, request: Request) -> SequenceState:
        """Enqueue a request.

        Raises:
            InputError: its prompt is empty, or leaves no room for a token.
        """
        check_prompt(request.prompt, self.predictor.length)
        sequence = SequenceState(request, self.tokenizer, self.predictor.length)
        self.waiting.append(sequence)
        return sequence

    def cancel(self, sequence: SequenceState) -> None:
        """Remove a request."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        elif sequence in self.running:
            self._remove(sequence)

    def step(self) -> list[tuple[SequenceState, str]]:
        """Prefill waiting requests, as many as there is room for, and generate a token for each running one.

        Returns:
            The sequences with a new token or an end, each with its new text.
        """
        num_running = len(self.running)
        updates: list[tuple[SequenceState, str]] = []
        if admitted := self._admit():
            if admitted[0].request.prompt_logprobs:
                logits = self._score(num_running, *admitted)
            else:
                prompts = [sequence.request.prompt for sequence in admitted]
                logits = self.predictor.forward(num_running, [0] * len(admitted), prompts)
            updates += zip(admitted, self._sample(admitted, logits), strict=True)
        if num_running:
            running = self.running[:num_running]
            starts = [len(sequence.tokens) - 1 for sequence in running]
            logits = self.predictor.forward(0, starts, [sequence.tokens[-1:] for sequence in running])
            updates += zip(running, self._sample(running, logits), strict=True)
        # Before a removal moves a row with its values.
        for row, sequence in enumerate(self.running):
            if sequence.reason == "error":
                self.predictor.clear(row)
        for sequence, _ in updates:
            if sequence.reason is not None:
                self._remove(sequence)
        return updates

    def _admit(self) -> list[SequenceState]:
        """Assign rows to the next waiting requests.

        Prompts of a prefill are padded to the longest; a prompt with log-probabilities is processed alone.
        """
        admitted: list[SequenceState] = []
        while self.waiting and len(self.running) < self.predictor.rows:
            lengths = [len(sequence.tokens) for sequence in (*admitted, self.waiting[0])]
            alone = self.waiting[0].request.prompt_logprobs or (
                admitted and admitted[0].request.prompt_logprobs
            )
            if admitted and (alone or max(lengths) * len(lengths) > MAX_PREFILL_TOKENS):
                break
            admitted.append(self.waiting.popleft())
            self.running.append(admitted[-1])
        return admitted

    def _score(self, row: int, sequence: SequenceState) -> Tensor:
        """Process a prompt in pieces and store its log-probabilities.

        Returns:
            Logits [1, v] after the prompt; NaN if those of any position are not finite.
        """
        prompt, finite, logits_nv = sequence.request.prompt, True, torch.empty(0)
        for start in range(0, len(prompt), MAX_SCORED_TOKENS):
            end = start + MAX_SCORED_TOKENS
            logits_nv = self.predictor.forward(row, [start], [prompt[start:end]], all_positions=True)
            finite = finite and bool(logits_nv.sum().isfinite())
            targets = torch.tensor(prompt[start + 1 : end + 1], dtype=torch.int64)
            num_top = sequence.request.top_logprobs or 0
            sequence.prompt_logprobs += _logprobs(logits_nv[: len(targets)], targets, num_top)
        return logits_nv[-1:] if finite else torch.full_like(logits_nv[-1:], torch.nan)

    def _sample(self, sequences: Sequence[SequenceState], logits_nv: Tensor) -> list[str]:
        """Append a token to each sequence, and return the new texts. A sequence whose logits are not finite ends."""
        finite = logits_nv.sum(-1).isfinite()
        if not finite.all():
            for sequence, is_finite in zip(sequences, finite.tolist(), strict=True):
                if not is_finite:
                    sequence.reason = "error"
            # Any token will do for them: it is not used.
            logits_nv = logits_nv.masked_fill(~finite.unsqueeze(1), 0.0)
        tokens = sample_tokens(logits_nv, [sequence.sampler for sequence in sequences])
        texts = []
        for i, (sequence, token) in enumerate(zip(sequences, tokens, strict=True)):
            if sequence.reason == "error":
                texts.append("")
                continue
            if sequence.request.top_logprobs is not None:
                own = torch.tensor([token])
                sequence.logprobs += _logprobs(logits_nv[i : i + 1], own, sequence.request.top_logprobs)
            texts.append(sequence.add(token, self.ends))
        return texts

    def _remove(self, sequence: SequenceState) -> None:
        """Free the row of a sequence. The last row moves there, so that used rows stay contiguous."""
        row, last = self.running.index(sequence), self.running.pop()
        if last is not sequence:
            self.running[row] = last
            self.predictor.copy([len(self.running)], [row], len(last.tokens))


def _logprobs(logits_nv: Tensor, tokens_n: Tensor, num_top: int) -> list[TokenLogprob]:
    logprobs_nv = logits_nv.log_softmax(-1)
    own = logprobs_nv.gather(1, tokens_n.unsqueeze(1)).squeeze(1).tolist()
    top = logprobs_nv.topk(min(num_top, logprobs_nv.shape[1]))
    rows = zip(own, top.indices.tolist(), top.values.tolist(), strict=True)
    return [TokenLogprob(logprob, list(zip(ids, values, strict=True))) for logprob, ids, values in rows]


def generate(
    batcher: Batcher, requests: Sequence[Request], advance: Callable[[int], object] = lambda number: None
) -> list[str]:
    """Return the continuations of requests.

    Args:
        advance: called with the index of each request that has ended.

    Raises:
        NonFiniteLogits: the model computed NaN or infinity.
    """
    indices = {batcher.add(request): i for i, request in enumerate(requests)}
    texts = [""] * len(requests)
    while batcher.waiting or batcher.running:
        for sequence, text in batcher.step():
            texts[indices[sequence]] += text
            check_finite(sequence)
            if sequence.reason is not None:
                advance(indices[sequence])
    return texts
