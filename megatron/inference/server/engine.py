"""Texts for many clients at once: an event loop takes requests, another thread computes.

The model is for one thread, the main one: collectives and a GPU's context want it, and signals come there. What the
loop wants of it goes through a queue, as functions that run between two tokens; what has grown comes back once a step.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import functools
import math
import queue
import time
from collections.abc import AsyncIterator, Callable, Sequence

from torch import Tensor

from megatron.flags import InputError
from megatron.inference.batching import Batcher, Growth, Request, Score
from megatron.inference.beam import BeamConfig, Hypothesis, beam_search
from megatron.inference.predictor import Predictor
from megatron.inference.server.errors import ApiError
from megatron.inference.server.metrics import Metrics
from megatron.tokenizer import Tokenizer

STOPPING = "the server is stopping"


@dataclasses.dataclass(frozen=True)
class Piece:
    """What one of the texts that were asked for together has grown by.

    Attributes:
        number: of the text among them.
        text: what is certain by now, beyond what was before.
        token: that it has grown by; None if it ended.
        score: of the token, if asked for.
        prompt_scores: of the prompt's tokens but the first, if asked for; the same with each piece.
        reason: why it ended: "stop" or "length"; None while it grows.
    """

    number: int
    text: str
    token: int | None
    score: Score | None
    prompt_scores: list[Score]
    reason: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Search:
    """A beam search, which no other text grows beside."""

    prompt: Sequence[int]
    config: BeamConfig
    length: int
    eod: int | None


class Ticket:
    """Texts that were asked for together. Lives on the event loop's thread."""

    def __init__(self, engine: Engine, work: Sequence[Request] | Search, seconds: float) -> None:
        self.engine, self.work = engine, work
        self.loop = asyncio.get_running_loop()
        self.open = self.count = 1 if isinstance(work, Search) else len(work)
        self._news: asyncio.Queue[Piece | list[Hypothesis] | ApiError] = asyncio.Queue()
        self._begin, self._has_begun = self.loop.time(), False
        late = ApiError(504, f"the request took longer than {seconds:g} seconds", code="timeout")
        self._timer = self.loop.call_later(seconds, self.fail, late)

    async def news(self) -> AsyncIterator[Piece | list[Hypothesis]]:
        """What comes of it, until all texts have ended.

        Raises:
            ApiError: it came to an end before.
        """
        left = self.count
        while left:
            news = await self._news.get()
            if isinstance(news, ApiError):
                raise news
            if not isinstance(news, Piece) or news.reason is not None:
                left -= 1
            yield news

    def take(self, news: Piece | list[Hypothesis]) -> None:
        """Hear from the engine."""
        if not self.open:
            return  # cancelled meanwhile
        if not self._has_begun:
            self._has_begun = True
            self.engine.metrics.first_token.observe(self.loop.time() - self._begin)
        if not isinstance(news, Piece) or news.reason is not None:
            self._close(1)
        self._news.put_nowait(news)

    def fail(self, error: ApiError) -> None:
        """End it by an error."""
        self._news.put_nowait(error)
        self.cancel()

    def cancel(self) -> None:
        """Forget what has not ended. May be called at any time."""
        if self.open:
            self._close(self.open)
            self.engine.call(functools.partial(self.engine.forget, self))

    def _close(self, count: int) -> None:
        self.open -= count
        self.engine.load -= count
        if not self.open:
            self._timer.cancel()


class Engine:
    """Lets texts grow for tickets: `run` on one thread; `submit`, and all of a ticket, on the event loop's.

    Attributes:
        load: texts that grow or wait. Of the event loop.
        running: texts that grow.
    """

    def __init__(self, predictor: Predictor, tokenizer: Tokenizer, *, max_queue: int) -> None:
        """The predictor must have its rows."""
        self.predictor, self.tokenizer, self.metrics = predictor, tokenizer, Metrics()
        self.capacity, self.load, self.closing = predictor.rows + max_queue, 0, False
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._batcher = Batcher(predictor, tokenizer)
        self._waiting: collections.deque[tuple[Ticket, int, Request | Search]] = collections.deque()
        self._growing: dict[Growth, tuple[Ticket, int]] = {}
        self._ends = math.inf

    @property
    def running(self) -> int:
        return len(self._batcher.growing)

    def submit(self, work: Sequence[Request] | Search, seconds: float) -> Ticket:
        """Ask for texts, which must come within so many seconds.

        Raises:
            ApiError: there are too many, by themselves or with those under way; or the server is stopping.
        """
        count = 1 if isinstance(work, Search) else len(work)
        if self.closing:
            raise ApiError(503, STOPPING)
        if count > self.capacity:
            raise ApiError(
                400, f"the request is for {count} texts, and the server takes {self.capacity} at once"
            )
        if self.load + count > self.capacity:
            raise ApiError(
                429,
                f"the server is busy with {self.load} of {self.capacity} texts; try again later",
                headers={"Retry-After": "1"},
            )
        self.load += count
        ticket = Ticket(self, work, seconds)
        self.call(functools.partial(self._add, ticket))
        return ticket

    def stop(self, seconds: float) -> None:
        """Take no more requests, and end when those under way have, or after so many seconds. For any thread, and
        for handlers of signals."""
        self._ends, self.closing = time.monotonic() + seconds, True
        self.call(lambda: None)

    def call(self, function: Callable[[], None]) -> None:
        """Have a function run on the engine's thread, between two tokens."""
        self._calls.put(function)

    def run(self) -> None:
        """Compute, until it is stopped. However it ends, tickets hear of it."""
        try:
            while True:
                idle = not self._waiting and not self._growing
                while not self._calls.empty() or (idle and not self.closing):
                    self._calls.get()()
                    idle = not self._waiting and not self._growing
                if self.closing and (idle or time.monotonic() > self._ends):
                    return
                self._admit()
                self._step()
        finally:
            self.closing = True
            while not self._calls.empty():
                self._calls.get()()
            tickets = {ticket for ticket, *_ in (*self._waiting, *self._growing.values())}
            for ticket in tickets:
                self._tell(ticket, functools.partial(ticket.fail, ApiError(503, STOPPING)))

    def forget(self, ticket: Ticket) -> None:
        """Drop what a ticket still has under way. On the engine's thread."""
        self._waiting = collections.deque(entry for entry in self._waiting if entry[0] is not ticket)
        for growth in [growth for growth, (owner, _) in self._growing.items() if owner is ticket]:
            self._batcher.cancel(growth)
            del self._growing[growth]

    def _add(self, ticket: Ticket) -> None:
        work = [ticket.work] if isinstance(ticket.work, Search) else ticket.work
        self._waiting += [(ticket, number, wanted) for number, wanted in enumerate(work)]

    def _admit(self) -> None:
        """Hand what waits to the batcher, up to a beam search; that waits until nothing grows any more."""
        while self._waiting:
            ticket, number, wanted = self._waiting[0]
            if isinstance(wanted, Search) and self._growing:
                return
            self._waiting.popleft()
            try:
                if isinstance(wanted, Search):
                    self._search(ticket, wanted)
                else:
                    self._growing[self._batcher.add(wanted)] = (ticket, number)
            except InputError as error:
                wrong = ApiError(400, str(error), param="prompt")
                self._tell(ticket, functools.partial(ticket.fail, wrong))

    def _search(self, ticket: Ticket, wanted: Search) -> None:
        def goes_on() -> bool:
            return ticket.open > 0 and time.monotonic() < self._ends

        predictor = _Watched(self.predictor, goes_on)
        with contextlib.suppress(_Cut):
            found = beam_search(predictor, wanted.prompt, wanted.config, length=wanted.length, eod=wanted.eod)
            self._tell(ticket, functools.partial(self._hand_out_beams, ticket, found))
            return
        self._tell(ticket, functools.partial(ticket.fail, ApiError(503, STOPPING)))

    def _step(self) -> None:
        begin = time.perf_counter()
        pieces = []
        for growth, text in self._batcher.step():
            ticket, number = self._growing[growth]
            at_eod = growth.reason == "stop" and not growth.text.stopped
            token = None if at_eod else growth.new[-1]
            score = growth.scores[-1] if growth.scores and not at_eod else None
            pieces.append((ticket, Piece(number, text, token, score, growth.prompt_scores, growth.reason)))
            if growth.reason is not None:
                del self._growing[growth]
        if pieces:
            seconds = time.perf_counter() - begin
            self._tell(pieces[0][0], functools.partial(self._hand_out, pieces, seconds))

    def _hand_out(self, pieces: list[tuple[Ticket, Piece]], seconds: float) -> None:
        """On the event loop's thread: what a step has made, in as many seconds."""
        grown = sum(piece.token is not None for _, piece in pieces)
        self.metrics.generated_tokens += grown
        self.metrics.token.observe(seconds, grown)
        for ticket, piece in pieces:
            ticket.take(piece)

    def _hand_out_beams(self, ticket: Ticket, found: list[Hypothesis]) -> None:
        self.metrics.generated_tokens += sum(len(hypothesis.tokens) for hypothesis in found)
        ticket.take(found)

    def _tell(self, ticket: Ticket, call: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            ticket.loop.call_soon_threadsafe(call)


class _Cut(Exception):
    """A search that nobody waits for any more."""


class _Watched:
    """A predictor that goes on only as long as somebody waits."""

    def __init__(self, predictor: Predictor, goes_on: Callable[[], bool]) -> None:
        self.length, self.vocab_size, self.copy = predictor.length, predictor.vocab_size, predictor.copy
        self._forward, self._goes_on = predictor.forward, goes_on

    def forward(self, first: int, starts: Sequence[int], tokens: Sequence[Sequence[int]]) -> Tensor:
        if not self._goes_on():
            raise _Cut
        return self._forward(first, starts, tokens)
